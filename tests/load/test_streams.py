"""The paced source behind its real wire, and figures of streams that can be worked out by hand."""

import importlib
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from slipstream import __version__, wire
from slipstream_compose.server import repository_root
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.vocab import TokenBytes

NAMES = ("paced_engine", "streams")
MS = 1_000_000
CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"


@pytest.fixture(scope="module")
def bench():
    """The scripts as modules; they import each other by their plain names, as they are run."""
    folder = str(repository_root() / "benchmarks")
    sys.path.insert(0, folder)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(folder)
    for name in NAMES:
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("paced")


def submit(number: int, max_tokens: int, **sampling: object) -> wire.Submit:
    return wire.Submit(number, [1, 2], SamplingParams(max_tokens=max_tokens, **sampling), 5)


def test_neighbours_make_other_letters(bench):
    texts = [bench.paced_engine.expected_bytes(seed, 200) for seed in range(20)]
    assert all(len(text) == 200 for text in texts)
    for one, other in itertools.pairwise(texts):
        assert all(a != b for a, b in zip(one, other, strict=True))


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_every_request_gets_its_letters_once_and_in_order(bench, scratch, requests):
    """(steps before it, tokens, sequences, is cancelled after two steps) of each request."""
    journal = scratch / "journal"
    journal.unlink(missing_ok=True)
    letters = list(bench.paced_engine.LETTERS)  # a token id is its letter
    engine = bench.paced_engine.PacedEngine(letters, 0.0, journal)
    texts: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], wire.Finished] = {}
    made: dict[tuple[int, int], list[int]] = {}

    def step() -> None:
        for tokens in engine.step()[b"bridge"] if engine.has_work else ():
            key = (tokens.request, tokens.index)
            assert key not in ends
            texts.setdefault(key, []).extend(tokens.token_ids)
            made.setdefault(key, []).extend([engine.num_steps - 1] * len(tokens.token_ids))
            if tokens.finished is not None:
                ends[key] = tokens.finished

    for number, (pause, max_tokens, n, is_cancelled) in enumerate(requests):
        for _ in range(pause):
            step()
        engine.submit(b"bridge", submit(number, max_tokens, n=n, seed=100 + number))
        if is_cancelled:
            step()
            step()
            assert engine.cancel(b"bridge", number) == (max_tokens > 2)
    while engine.has_work:
        step()
    first = bench.streams.read_journal(journal).first
    for number, (_, max_tokens, n, is_cancelled) in enumerate(requests):
        count = min(max_tokens, 2) if is_cancelled else max_tokens
        reason = "cancelled" if count < max_tokens else "length"
        wanted = list(bench.paced_engine.expected_bytes(100 + number, count))
        for index in range(n):
            assert texts[number, index] == wanted
            assert ends[number, index].reason == reason
            assert ends[number, index].num_output_tokens == count
            steps = list(range(first[100 + number], first[100 + number] + count))
            assert made[number, index] == steps


def test_the_source_is_started_like_an_engine_and_speaks_its_wire(bench, scratch):
    config, python = scratch / "engine.json", scratch / "python"
    config.write_text(f'{{"checkpoint": "{CHECKPOINT}"}}')
    bench.paced_engine.write_python(python, 0.01, scratch / "paced")
    address = f"ipc://{scratch}/engine.sock"
    command = [str(python), "-P", "-m", "slipstream.engine.loop", "--config", str(config)]
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    with subprocess.Popen([*command, "--socket", address]) as source:
        try:
            texts, steps, found = talk(socket)
        finally:
            source.terminate()
            context.destroy(0)
    vocab = TokenBytes.load(CHECKPOINT)
    for request in (1, 2):
        text = b"".join(map(vocab.raw, texts[request]))
        assert text == bench.paced_engine.expected_bytes(30 + request, 20)
    gaps = np.diff(steps) / MS
    assert np.all(gaps > 1)
    assert gaps.mean() == pytest.approx(10, rel=0.5)
    assert found.running == 2


def talk(socket) -> tuple[dict[int, list[int]], list[int], wire.Status]:
    """Two requests of 20 tokens: their tokens, when the steps were, and the status meanwhile."""

    def say(message: wire.ToEngine) -> None:
        socket.send(wire.encode(message))

    def hear() -> wire.BridgeMessage:
        assert socket.poll(10_000), "no word from the source"
        return wire.decode_bridge(socket.recv())

    say(wire.Hello(wire.PROTOCOL, __version__, "test"))
    welcome = hear()
    assert isinstance(welcome, wire.Welcome), welcome
    for request in (1, 2):
        say(submit(request, 20, seed=30 + request))
    say(wire.Ping(9))
    texts: dict[int, list[int]] = {1: [], 2: []}
    steps, status, num_running = [], None, 2
    while num_running or status is None:
        message = hear()
        if isinstance(message, wire.Status):
            status = message
            continue
        assert isinstance(message, wire.StepOutputs), message
        steps.append(message.made_ns)
        for tokens in message.tokens:
            texts[tokens.request] += tokens.token_ids
            num_running -= tokens.finished is not None
    return texts, steps, status


def stream(bench, seed: int, sizes: list[int], first_ms: int, late_ms: list[float]):
    """A stream whose responses hold so many tokens, each so long after its last token's making."""
    ends = np.cumsum(sizes)
    text = bench.paced_engine.expected_bytes(seed, int(ends[-1]))
    texts = [text[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    times = [
        int((first_ms + 10 * (end - 1) + late) * MS)
        for end, late in zip(ends, late_ms, strict=True)
    ]
    return bench.streams.Received(seed, 0, times, texts)


@pytest.fixture(scope="module")
def journal(bench):
    """A step every 10 ms; stream 1 begins in step 0, stream 2 in step 2."""
    return bench.streams.Journal(np.arange(14, dtype=np.int64) * 10 * MS, {1: 0, 2: 2})


def test_delays_by_hand(bench, journal):
    one = stream(bench, 1, [1] * 12, 0, [3] * 12)
    two = stream(bench, 2, [1, 1, 2, 2, 2, 2, 2], 20, [5] * 7)
    assert bench.streams.fault(one, 12) == bench.streams.fault(two, 12) == ""
    found = bench.streams.figures([one, two], journal, 12)
    # All run in steps 2 to 11. One: ten times 3 ms. Two: 5, 5, then four pairs of 15 and 5.
    assert found["seconds"] == 0.09
    assert found["made_tok_s"] == round(18 / 0.09)
    assert found["p50_ms"] == 4.0
    assert found["max_ms"] == 15.0
    assert found["first_p50_ms"] == 4.0
    assert found["is_growing"] is False
    # Until step 11 was made, at 110 ms: one's tokens of steps 2 to 10, two's of steps 2 to 9.
    assert found["tok_s"] == round(17 / 0.09)
    # And responses from 20 ms on: one's at 23..103, two's at 25, 35, 55, 75 and 95.
    assert found["resp_s"] == round(14 / 0.09)


def test_a_growing_backlog_is_seen(bench, journal):
    lame = stream(bench, 1, [1] * 12, 0, [3.0 + 4 * i for i in range(12)])
    found = bench.streams.figures([lame], journal, 12)
    assert found["is_growing"] is True
    assert found["quarters_ms"] == [7.0, 19.0, 31.0, 43.0]


def test_streams_that_never_run_together_have_no_figures(bench, journal):
    streams = [stream(bench, seed, [5], 0, [1]) for seed in (1, 2)]
    with pytest.raises(ValueError, match="all together"):
        bench.streams.figures(streams, journal, 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda texts: texts[:-1], "11 of 12 tokens, the first 11 are right"),
        (lambda texts: texts[:3] + texts[2:], "13 of 12 tokens, the first 3 are right"),
        (lambda texts: [*texts[:4], texts[5], texts[4], *texts[6:]], "the first 4 are right"),
    ],
)
def test_lost_doubled_and_swapped_tokens_are_faults(bench, change, said):
    right = stream(bench, 1, [1] * 12, 0, [0] * 12)
    right.texts = change(right.texts)
    assert said in bench.streams.fault(right, 12)


def test_an_error_is_a_fault(bench):
    right = stream(bench, 1, [12], 0, [0])
    right.error = "UNAVAILABLE: gone"
    assert bench.streams.fault(right, 12) == "stream 1: UNAVAILABLE: gone"
