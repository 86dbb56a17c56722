"""The paced source behind its real wire, and figures of streams that can be worked out by hand."""

import argparse
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
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.vocab import TokenBytes
from slipstream_serve.server import repository_root, server_directory

NAMES = ("paced_engine", "stream_clients", "stream_figures", "stream_picture", "streams")
SCRIPTS = (*NAMES, "handover_journal", "report", "limits", "rows", "workloads", "shapes")
MS = 1_000_000
CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"


@pytest.fixture(scope="module")
def bench():
    """The scripts as modules; they import each other by their plain names, as they are run."""
    folder = str(repository_root() / "benchmarks")
    sys.path.insert(0, folder)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(folder)
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("paced")


def submit(number: int, max_tokens: int, **sampling: object) -> wire.Submit:
    return wire.Submit(number, pack([1, 2]), SamplingParams(max_tokens=max_tokens, **sampling), 5)


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
    noted = bench.stream_figures.read_journal(journal)
    first = noted.first
    for seed, number in first.items():  # times of one clock
        assert 0 <= noted.made_ns[number] - noted.submitted_ns[seed] < 60_000 * MS
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
    command = [str(python), "-P", "-m", "slipstream.engine.process", "--config", str(config)]
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
    assert np.all(gaps > 0)
    assert gaps.sum() > 0.9 * 10 * len(gaps)  # no sooner; a busy machine is later
    assert found.running == 2


def talk(socket) -> tuple[dict[int, list[int]], list[int], wire.Status]:
    """Two requests of 20 tokens: their tokens, when the steps were, and the status meanwhile."""

    def say(message: wire.ToEngine) -> None:
        socket.send(wire.encode(message))

    def hear() -> wire.BridgeMessage:
        assert socket.poll(120_000), "no word from the source"
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


# --- figures ---------------------------------------------------------------------------------


def stream(bench, seed: int, sizes: list[int], first_ms: int, late_ms: list[float]):
    """A stream whose responses hold so many tokens, each handed over so long after its last
    token's making, and half a millisecond later at its client.
    """
    ends = np.cumsum(sizes)
    text = bench.paced_engine.expected_bytes(seed, int(ends[-1]))
    times = np.array([(first_ms + 10 * (end - 1)) for end in ends]) + np.array(late_ms)
    times, counts = (times * MS).astype(np.int64), np.array(sizes)
    received = bench.stream_clients.Received(seed, -20 * MS, times + MS // 2, counts, text)
    return received, bench.stream_figures.Handed(times, counts)


@pytest.fixture(scope="module")
def journal(bench):
    """A step every 10 ms; stream 1 begins in step 0, stream 2 in step 2."""
    made = np.arange(14, dtype=np.int64) * 10 * MS
    return bench.stream_figures.Journal(made, {1: 0, 2: 2, 3: 6}, {1: -15 * MS, 2: 0, 3: 50 * MS})


def test_delays_by_hand(bench, journal):
    one, by_one = stream(bench, 1, [1] * 12, 0, [3] * 12)
    two, by_two = stream(bench, 2, [1, 1, 2, 2, 2, 2, 2], 20, [5] * 7)
    fault = bench.stream_figures.fault
    assert fault(one, by_one, 12) == fault(two, by_two, 12) == ""
    found = bench.stream_figures.figures([[one], [two]], journal, {1: by_one, 2: by_two})
    # All run in steps 2 to 11. One: ten times 3 ms. Two: 5, 5, then four pairs of 15 and 5.
    assert found["seconds"] == 0.09
    assert found["made_tok_s"] == round(18 / 0.09)
    assert found["p50_ms"] == 4.0
    assert found["client_p50_ms"] == 4.5
    assert found["max_ms"] == 15.0
    assert found["first_p50_ms"] == 4.0
    assert found["added_p50_ms"] == (3 + 5 + 5 + 20) / 2  # on the way in 5 and 20 ms
    assert found["open_p50_ms"] == (23.5 + 45.5) / 2
    assert found["is_growing"] is False
    # Until step 11 was made, at 110 ms: one's tokens of steps 2 to 10, two's of steps 2 to 9.
    assert found["tok_s"] == round(17 / 0.09)
    # And responses from 20 ms on: one's at 23..103, two's at 25, 35, 55, 75 and 95.
    assert found["resp_s"] == round(14 / 0.09)


def test_streams_of_a_slot_follow_one_another(bench, journal):
    one, by_one = stream(bench, 1, [1] * 6, 0, [3] * 6)
    next_one, by_next = stream(bench, 3, [1] * 6, 60, [4] * 6)
    two, by_two = stream(bench, 2, [1] * 12, 20, [5] * 12)
    handed = {1: by_one, 2: by_two, 3: by_next}
    found = bench.stream_figures.figures([[one, next_one], [two]], journal, handed)
    # Steps 2 to 11: of the first slot four tokens of 3 ms and six of 4 ms.
    assert found["made_tok_s"] == round(18 / 0.09)
    assert found["shares_ms"][0] == 3.0
    assert found["p50_ms"] == 4.5
    assert found["max_ms"] == 5.0


def test_a_growing_backlog_is_seen(bench, journal):
    lame, by_lame = stream(bench, 1, [1] * 12, 0, [3.0 + 4 * i for i in range(12)])
    found = bench.stream_figures.figures([[lame]], journal, {1: by_lame})
    assert found["is_growing"] is True
    assert found["quarters_ms"] == [7.0, 19.0, 31.0, 43.0]


def test_growing_memory_is_seen_of_those_who_are_judged(bench):
    samples = [{"server": 100 + 30 * i, "stubs": 300 + i % 2} for i in range(8)]
    memory, nothing = bench.stream_figures.memory, np.zeros(8)
    assert memory(samples, nothing, ["stubs"])["is_memory_growing"] is False
    assert memory(samples, nothing, ["stubs", "server"])["is_memory_growing"] is True
    assert memory(samples, nothing, [])["server_mb"] == [115.0, 175.0, 235.0, 295.0]


def test_what_more_kept_responses_take_is_no_growth(bench):
    kept = np.array([0, 50, 100, 100, 100, 110, 150, 100]) * 1000  # 3 MB a thousand
    most = np.array([0, 50, 100, 100, 100, 110, 150, 150])
    samples = [{"server": 100 + 3 * float(each), "stubs": 3} for each in most]
    found = bench.stream_figures.memory(samples, kept, ["server", "stubs"])
    assert found["kept_thousands"] == [25, 100, 105, 150]
    assert found["is_memory_growing"] is False
    leaking = [sample | {"server": sample["server"] + 20 * i} for i, sample in enumerate(samples)]
    assert bench.stream_figures.memory(leaking, kept, ["server"])["is_memory_growing"] is True
    stubs = [{"server": 3, "stubs": sample["server"]} for sample in samples]  # they keep nothing
    assert bench.stream_figures.memory(stubs, kept, ["stubs"])["is_memory_growing"] is True


def test_a_stream_keeps_its_responses_until_it_ends(bench):
    pairs = [stream(bench, 1, [1] * 3, 0, [0] * 3), stream(bench, 2, [1] * 5, 10, [0] * 5)]
    streams = [received for received, _ in pairs]
    times = np.concatenate([received.times_ns for received in streams])
    ends = [int(received.times_ns[-1]) for received in streams]
    for time_ns in [*times, *(times - 1), *(times + 1)]:
        open_now = [s for s, end in zip(streams, ends, strict=True) if time_ns < end]
        kept = sum(int(sum(s.times_ns <= time_ns)) for s in open_now)
        assert bench.stream_figures.num_kept(streams, [time_ns])[0] == kept


def test_streams_that_never_run_together_have_no_figures(bench, journal):
    pairs = [stream(bench, seed, [5], 0, [1]) for seed in (1, 3)]
    handed = {received.seed: by for received, by in pairs}
    with pytest.raises(ValueError, match="all together"):
        bench.stream_figures.figures([[received] for received, _ in pairs], journal, handed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-1], "11 of 12 tokens, the first 11 right"),
        (lambda text: text[:3] + text[2:], "13 of 12 tokens, the first 3 right"),
        (
            lambda text: text[:4] + text[5:6] + text[4:5] + text[6:],
            "12 of 12 tokens, the first 4 right",
        ),
    ],
)
def test_lost_doubled_and_swapped_tokens_are_faults(bench, change, said):
    right, handed = stream(bench, 1, [1] * 12, 0, [0] * 12)
    right.text = change(right.text)
    assert said in bench.stream_figures.fault(right, handed, 12)


def test_an_error_and_a_wrong_count_are_faults(bench):
    right, handed = stream(bench, 1, [12], 0, [0])
    right.counts = np.array([11])
    fault = bench.stream_figures.fault
    assert "11 tokens by its responses, 12 handed over" in fault(right, handed, 12)
    right.error = "UNAVAILABLE: gone"
    assert fault(right, handed, 12) == "stream 1: UNAVAILABLE: gone"


def test_goals_are_those_of_the_machine_and_the_wiring(bench):
    row = {"streams": 256, "rate": 100, "wiring": "fused", "p50_ms": 6.0, "p99_ms": 20.0}
    row |= {"is_growing": False, "is_memory_growing": False}
    judge = bench.stream_figures.judge
    large = {goal["figure"]: goal["is_reached"] for goal in judge(row, 16)}
    assert large == {"p50_ms": True, "p99_ms": False}
    assert all(goal["is_reached"] for goal in judge(row, 2))
    grown = [goal for goal in judge(row | {"is_growing": True}, 2) if not goal["is_reached"]]
    assert [goal["figure"] for goal in grown] == ["is_growing"]
    assert all(goal["is_reached"] for goal in judge(row | {"wiring": "composed"}, 16))
    assert judge(row | {"streams": 3}, 2) == []


def test_a_long_row_is_made_of_streams_that_do_not_all_end_at_once(bench):
    plan = bench.streams.Plan.of("fused", "64x100", 300)
    for slot in plan.slots:
        assert abs(sum(prompt.max_tokens for prompt in slot) - 30_000) < 16
        assert max(prompt.max_tokens for prompt in slot) <= 2000
    seeds = [prompt.seed for slot in plan.slots for prompt in slot]
    assert len(set(seeds)) == len(seeds)
    assert len({slot[0].max_tokens for slot in plan.slots}) == 64
    short = bench.streams.Plan.of("fused", "2x100", 10)
    assert [[prompt.max_tokens for prompt in slot] for slot in short.slots] == [[1000], [1000]]


# --- a real server ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("wiring", ["fused", "composed"])
def test_nothing_grows_while_streams_come_and_go(bench, wiring):
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    args = argparse.Namespace(seconds=100.0, clients=1, counts=True)
    row = bench.streams.measure(wiring, "64x50", args)  # every text and count is right, or it ends
    assert not row["is_growing"], row["quarters_ms"]
    assert not row["is_memory_growing"], (row["server_mb"], row["stubs_mb"])


@pytest.mark.triton
@pytest.mark.rest
def test_at_low_load_every_step_is_a_response(bench, tmp_path):
    """In both wirings, of 1 and of 4 streams; hand-overs are noted in between, token for token."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    seeds, streams, asked = itertools.count(1), {}, {}

    def receive(server, model: str, num_streams: int):
        slots = [[bench.stream_clients.Prompt(next(seeds), "a", 20)] for _ in range(num_streams)]
        asked.update((slot[0].seed, model) for slot in slots)
        load = bench.stream_clients.Load(server.endpoints.grpc, model, slots, 0, 60, True)
        found = bench.stream_clients.receive(load)[0]
        streams.update((received.seed, received) for received in found)
        return [int(count) for received in found for count in received.counts if count]

    with bench.streams.serving(0.05, tmp_path, tmp_path / "log") as server:
        for model, num_streams in itertools.product(bench.streams.MODELS.values(), (1, 4)):
            # A machine that stands still for a step makes two tokens leave together.
            assert any(
                receive(server, model, num_streams) == [1] * 20 * num_streams for _ in range(12)
            ), (model, num_streams)
    figures = bench.stream_figures
    journal = figures.read_journal(tmp_path / "journal")
    for wiring, name in bench.streams.NOTES_OF.items():
        handed = figures.read_handovers(tmp_path, name)
        model = bench.streams.MODELS[wiring]
        assert set(handed) == {seed for seed in asked if asked[seed] == model}
        for seed, notes in handed.items():
            assert figures.fault(streams[seed], notes, 20) == ""
            made = journal.made_ns[journal.first[seed] :][:20]
            assert np.all(np.repeat(notes.times_ns, notes.counts) >= made)
            opened = streams[seed].opened_ns
            assert opened <= journal.submitted_ns[seed] <= made[0]
