"""Any bytes as a frame: a message, or `DecodeError`; nothing else, and at no cost."""

import gc
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream import wire
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

SAMPLING = SamplingParams(max_tokens=9, n=2, stop_words=(b"ab",), bias=((4, 0.5),))
FINISHED = wire.Finished(wire.FinishReason.STOP, 3, 2, wire.Perf(1, 2, 3, 4, 5, 6, 7), "ab")
TO_ENGINE: list[wire.ToEngine] = [
    wire.Hello(wire.PROTOCOL, "1.0", "a model"),
    wire.Submit(2, pack(list(range(40))), SAMPLING, 1),
    wire.Cancel(1),
    wire.Ping(1),
    wire.Bye(),
]
TO_BRIDGE: list[wire.ToBridge] = [
    wire.Welcome(wire.PROTOCOL, "1.0", "a model", 77, 1000, 99),
    wire.Refused("why"),
    wire.StepOutputs(4, 5, [wire.Tokens(2, 0, [7, 8], [-0.5, -1.0], 1, FINISHED, 3)]),
    wire.Rejected(3, "INVALID_ARGUMENT", "why"),
    wire.Status(1, "a model", 77, 5, 6, 1, 2, 0.5, 8, 9, ["one"], requests=[1, 2]),
]


@pytest.mark.parametrize("message", [*TO_ENGINE, *TO_BRIDGE], ids=lambda m: type(m).__name__)
def test_every_message_comes_back_and_no_beginning_of_it_is_one(message: object) -> None:
    is_ours = isinstance(message, wire.ToEngine)
    decode = wire.decode_engine if is_ours else wire.decode_bridge
    other = wire.decode_bridge if is_ours else wire.decode_engine
    frame = wire.encode(message)
    assert decode(frame) == message
    with pytest.raises(msgspec.DecodeError):
        other(frame)
    for size in range(len(frame)):
        with pytest.raises(msgspec.DecodeError):
            decode(frame[:size])
    with pytest.raises(msgspec.DecodeError):
        decode(frame + b"\x00")


@pytest.mark.parametrize("data", [[1, 2], "abcd", b"abcdef", None])
def test_token_ids_are_bytes_four_of_each(data: object) -> None:
    fields = msgspec.msgpack.decode(wire.encode(TO_ENGINE[1]))
    assert isinstance(fields[2], bytes)
    fields[2] = data
    with pytest.raises(msgspec.DecodeError):
        wire.decode_engine(msgspec.msgpack.encode(fields))


def damaged() -> st.SearchStrategy[bytes]:
    """Frames with changed bytes, and arbitrary ones."""
    frames = st.sampled_from([wire.encode(message) for message in [*TO_ENGINE, *TO_BRIDGE]])
    changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6)

    def change(frame: bytes, changes: list[tuple[int, int]]) -> bytes:
        data = bytearray(frame)
        for place, value in changes:
            data[place % len(data)] = value
        return bytes(data)

    return st.binary(max_size=80) | st.builds(change, frames, changes)


@settings(max_examples=2000, deadline=None)
@given(damaged())
def test_any_bytes_are_a_message_or_an_error(frame: bytes) -> None:
    for decode in (wire.decode_engine, wire.decode_bridge):
        try:
            message = decode(frame)
        except msgspec.DecodeError:
            continue
        assert decode(wire.encode(message)) == message or "nan" in repr(message)


@pytest.mark.parametrize(
    "frame", [b"\xdd\xff\xff\xff\xff" * 3, b"\x91" * 1_000_000, b"\xc6\xff\xff\xff\xff"]
)
def test_a_frame_that_lies_about_its_size_costs_nothing(frame: bytes) -> None:
    begin = time.thread_time()
    for decode in (wire.decode_engine, wire.decode_bridge):
        with pytest.raises(msgspec.DecodeError):
            decode(frame)
    assert time.thread_time() - begin < 2


def test_the_collector_looks_at_nothing_that_comes_with_every_token():
    outputs = wire.StepOutputs(1, 2, [wire.Tokens(1, 0, [5], [])])
    decoded = wire.decode_bridge(wire.encode(outputs))
    assert isinstance(decoded, wire.StepOutputs)
    assert not gc.is_tracked(decoded.tokens[0])
