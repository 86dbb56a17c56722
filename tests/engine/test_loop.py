"""The process around the engine: handshake, cancel, lost bridges, and frames that mean nothing."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.engine.hashed import VOCAB_SIZE, Words, expected
from fixtures.engine.house import GREEDY, House, build
from slipstream import __version__, wire
from slipstream.engine import loop
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from slipstream_runtime import admission
from slipstream_runtime.admission import LoadFile, path_of

LONG = SamplingParams(max_tokens=30, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=4000, temperature=0.0)  # ends only if something ends it


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    yield from build(tmp_path, 40)


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[House]:
    """A runner with a context so long that no test reaches its end."""
    yield from build(tmp_path, 5000)


def test_hello_tokens_and_status(house: House) -> None:
    bridge = house.bridge("tensorrt_llm")
    status = bridge.ask()
    assert (status.model, status.bridges) == ("counting", ["tensorrt_llm"])
    assert (status.kv_blocks_free, status.kv_blocks_total, status.running) == (20, 20, 0)
    bridge.complete(0, [1, 2, 3])
    assert bridge.ask().kv_blocks_free == 20


def test_two_bridges_use_the_same_numbers(house: House) -> None:
    first, second = house.bridge("first"), house.bridge("second")
    first.say(wire.Submit(5, pack([9]), LONG, 1))
    second.complete(5, [4])
    assert sorted(first.ask().bridges) == ["first", "second"]


@pytest.mark.parametrize(
    ("protocol", "version"), [(wire.PROTOCOL + 1, __version__), (wire.PROTOCOL, "0.0.7")]
)
def test_another_version_is_refused(house: House, protocol: int, version: str) -> None:
    bridge = house.bridge(greet=False)
    bridge.say(wire.Hello(protocol, version, "old"))
    answer = bridge.hear()
    assert isinstance(answer, wire.Refused)
    assert f"protocol {protocol}, version {version}" in answer.reason


def test_a_stranger_is_told_to_say_hello(house: House) -> None:
    stranger = house.bridge(greet=False)
    stranger.say(wire.Submit(0, pack([1]), GREEDY, 1))
    assert isinstance(stranger.hear(), wire.Refused)
    assert not house.engine.has_work


def test_what_cannot_be_served_is_rejected(house: House) -> None:
    bridge = house.bridge()
    bridge.say(wire.Submit(3, pack([VOCAB_SIZE]), GREEDY, 1))
    answer = bridge.hear()
    assert isinstance(answer, wire.Rejected)
    assert (answer.request, answer.code) == (3, "INVALID_ARGUMENT")
    assert "outside the vocabulary" in answer.message
    bridge.complete(3, [1])


def test_cancel_and_bye_free_everything(roomy: House) -> None:
    bridge = roomy.bridge()
    bridge.say(wire.Submit(0, pack([1]), ENDLESS, 1))
    roomy.turn_until(lambda: roomy.engine.has_work)
    bridge.say(wire.Cancel(0))
    bridge.say(wire.Cancel(99))
    roomy.turn_until(lambda: roomy.loop.num_unknown == 1)
    while True:
        message = bridge.hear()
        assert isinstance(message, wire.StepOutputs)
        if message.tokens[0].finished is not None:
            assert message.tokens[0].finished.reason is wire.FinishReason.CANCELLED
            break
    bridge.say(wire.Submit(0, pack([1]), ENDLESS, 1))
    roomy.turn_until(lambda: roomy.engine.has_work)
    bridge.say(wire.Bye())
    roomy.turn_until(roomy.is_idle)


def test_messages_that_come_twice_are_dropped_and_counted(house: House) -> None:
    bridge = house.bridge("twice")
    submit = wire.Submit(4, pack([3, 1]), LONG, 1)
    for message in (submit, submit, wire.Hello(wire.PROTOCOL, __version__, "twice"), submit):
        bridge.say(message)
    tokens: list[wire.Tokens] = []
    while not (tokens and tokens[-1].finished):
        message = bridge.hear()
        assert isinstance(message, wire.StepOutputs)
        tokens += message.tokens
    assert house.loop.num_dropped == 3
    assert [t.start for t in tokens] == [
        sum(len(t.token_ids) for t in tokens[:i]) for i in range(len(tokens))
    ]
    text = b"".join(map(Words().raw, (i for t in tokens for i in t.token_ids)))
    assert (text, tokens[-1].finished.reason) == expected([3, 1], LONG)


def test_a_process_that_connects_anew_has_left_what_it_ran(roomy: House) -> None:
    """The old connection may look alive for seconds, with requests under ids that it uses again."""
    hello = wire.Hello(wire.PROTOCOL, __version__, "model", 77)
    submit = wire.Submit(0, pack([1]), ENDLESS, 1, request_id="mine", model="model")
    before, other = roomy.bridge(greet=False), roomy.bridge(greet=False)
    other.say(wire.Hello(wire.PROTOCOL, __version__, "model", 78))
    assert isinstance(other.hear(), wire.Welcome)
    for bridge in (before, roomy.bridge(greet=False)):
        bridge.say(hello)
        assert isinstance(bridge.hear(), wire.Welcome)
        bridge.say(submit)
        assert isinstance(bridge.hear(), wire.StepOutputs)
    assert other.ask().bridges == ["model", "model"]
    other.say(submit)
    answer = other.hear()
    assert isinstance(answer, wire.Rejected)
    assert answer.message == "request id 'mine' is already running"
    assert other.ask().requests == []


def test_a_bridge_is_told_which_of_its_requests_there_are(roomy: House) -> None:
    bridge, other = roomy.bridge(), roomy.bridge("other")
    for number in (7, 3):
        bridge.say(wire.Submit(number, pack([1]), ENDLESS, 1))
    other.say(wire.Submit(5, pack([1]), ENDLESS, 1))
    assert sorted(bridge.ask().requests or ()) == [3, 7]
    assert other.ask().requests == [5]


def test_a_bridge_that_vanishes_is_cancelled(roomy: House) -> None:
    bridge, other = roomy.bridge("dying"), roomy.bridge("other")
    bridge.say(wire.Submit(0, pack([1]), ENDLESS, 1))
    roomy.turn_until(lambda: roomy.engine.has_work)
    bridge.socket.close(0)
    roomy.turn_until(roomy.is_idle)
    other.complete(0, [2, 3])
    assert other.ask().bridges == ["other"]


def test_an_idle_bridge_that_vanished_is_found_by_a_probe(house: House) -> None:
    bridge, other = house.bridge("dying"), house.bridge("other")
    bridge.socket.close(0)
    other.ask()
    house.loop._heard_s = dict.fromkeys(house.loop._heard_s, 0.0)
    house.loop._next_probe_s = 0.0
    house.turn_until(lambda: len(house.loop._bridges) == 1)
    assert other.ask().bridges == ["other"]


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_its_load_is_told_while_it_has_work(
    roomy: House, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(admission, "MAX_AGE_NS", 10**12)  # however slow the machine is
    file = LoadFile(path_of(Path(roomy.address.removeprefix("ipc://"))))
    bridge, deadline_ns = roomy.bridge(), 0
    if end == "deadline":
        deadline_ns = time.monotonic_ns() + 10**12
        monkeypatch.setattr(roomy.engine, "_clock", lambda: now_ns[0])
    now_ns = [time.monotonic_ns()]
    for number in range(8):
        bridge.say(wire.Submit(number, pack([1]), ENDLESS, 1, deadline_ns=deadline_ns))
    roomy.turn_until(lambda: roomy.engine.status().running == 8)
    before = file.read()
    assert before is not None
    assert (before.num_requests, before.num_received, before.num_received_tokens) == (0, 8, 8)
    for number in range(8, 24):
        bridge.say(wire.Submit(number, pack([1]), ENDLESS, 1, deadline_ns=deadline_ns))
    roomy.turn_until(lambda: roomy.engine.load().num_requests == 16)
    load = file.read()
    assert load is not None
    assert load[:5] == (16, 16, 8, 16, 2_097_152)
    with pytest.raises(ContractError, match="16 requests wait with 16 tokens, max_waiting is 16"):
        load.raise_if_full()
    for number in range(24) if end == "cancel" else ():
        bridge.say(wire.Cancel(number))
    now_ns[0] += 2 * 10**12
    roomy.turn_until(roomy.is_idle)
    left, is_recent = file.last()
    assert left is not None
    assert not is_recent
    assert left.num_requests == left.num_tokens == 0
    assert (left.num_received, left.num_received_tokens) == (24, 24)


def test_it_tells_when_it_last_found_no_more(roomy: House, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LoadFile(path_of(Path(roomy.address.removeprefix("ipc://"))))

    def looked_ns() -> int:
        load, _ = file.last()
        assert load is not None
        return load.looked_ns

    bridge = roomy.bridge()
    began_ns = time.monotonic_ns()
    bridge.say(wire.Submit(0, pack([1]), ENDLESS, 1))
    roomy.turn_until(lambda: roomy.engine.status().running == 1)
    assert began_ns < looked_ns() < time.monotonic_ns()
    monkeypatch.setattr(loop, "_MAX_FRAMES", 1)  # as if more had come than it takes at a time
    for number in range(1, 200):
        bridge.say(wire.Submit(number, pack([1]), ENDLESS, 1))
    told = []
    while roomy.engine.load().num_received < 200:
        roomy.loop.turn(0)
        told.append(looked_ns())
    assert len(set(told)) < len(told)
    now_ns = time.monotonic_ns()
    assert looked_ns() < now_ns
    monkeypatch.undo()
    roomy.turn_until(lambda: looked_ns() > now_ns)


class AcceleratorError(RuntimeError):
    """A CUDA error that stays, by the name that torch gives it."""


def test_a_runner_beyond_repair_ends_the_loop_and_blames_no_request(house: House) -> None:
    bridge = house.bridge()
    bridge.say(wire.Submit(0, pack([1]), GREEDY, 1))
    house.runner.error = AcceleratorError("illegal address")
    assert house.loop.run() == 1
    assert not bridge.socket.poll(200)  # its bridge learns it from the connection's end


def seeds() -> list[bytes]:
    full = SamplingParams(
        max_tokens=9,
        n=2,
        seed=5,
        end_ids=(3,),
        stop_words=(b"ab",),
        bad_words=((1,), (2, 3)),
        bias=((4, 0.5),),
    )
    messages: list[wire.ToEngine] = [
        wire.Hello(wire.PROTOCOL, __version__, "fuzz"),
        wire.Submit(1, pack([1, 2, 3]), GREEDY, 1),
        wire.Submit(2, pack(list(range(30))), full, 1),
        wire.Cancel(1),
        wire.Ping(1),
        wire.Bye(),
    ]
    return [wire.encode(message) for message in messages]


def mutate(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        kind, at = rng.randrange(4), rng.randrange(len(data) + 1)
        if kind == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 5)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 5))
        else:
            data[at:at] = data[: rng.randint(0, 20)]
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_no_frame_ends_the_loop(house: House, seed: int) -> None:
    rng = random.Random(seed)
    good = house.bridge("good")
    fuzzers = [house.bridge("fuzz"), house.bridge(greet=False)]
    frames = seeds()
    for number in range(1500):
        socket = rng.choice(fuzzers).socket
        if rng.random() < 0.3:
            socket.send(rng.randbytes(rng.randrange(40)))
        elif rng.random() < 0.05:
            socket.send_multipart([rng.choice(frames)] * rng.randint(2, 3))
        else:
            socket.send(mutate(rng, rng.choice(frames)))
        if number % 25 == 0:
            house.turn()
        if number % 500 == 0:
            good.complete(number, [number % 7, 1])
    house.turn_until(house.is_idle)
    assert house.loop.num_dropped > 500
    good.complete(1, [5, 6])
    for fuzzer in fuzzers:
        fuzzer.say(wire.Bye())
    house.turn_until(lambda: len(house.loop._bridges) == 1)
    assert good.ask().kv_blocks_free == 20


def test_deep_and_lying_frames_are_dropped(house: House) -> None:
    good = house.bridge()
    frames = [
        b"",
        b"\x91" * 100_000,
        b"\x93\xa6Cancel\x01" + b"\x91" * 100_000,  # ends in the decoder's recursion limit
        b"\x95\xa6Submit\x01\xdd\xff\xff\xff\xff",  # promises 2**32 token ids
        b"\x94\xa5Hello\x01\xa2\xff\xfe\xa1a",  # no UTF-8
    ]
    for frame in frames:
        good.socket.send(frame)
    house.turn_until(lambda: house.loop.num_dropped == len(frames))
    good.complete(0, [1])


def test_the_welcome_has_the_adapters_that_there_are(house: House) -> None:
    """A client knows them as soon as it may send requests."""
    info = wire.AdapterInfo("one", "/one", 4, 8, "00")
    house.engine.adapters.infos = lambda: [info]
    bridge = house.bridge(greet=False)
    bridge.say(wire.Hello(wire.PROTOCOL, __version__, "late"))
    welcome = bridge.hear()
    assert isinstance(welcome, wire.Welcome)
    assert welcome.adapters == [info]
