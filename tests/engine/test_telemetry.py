"""The metrics of the engine agree with what its clients got; its reports say what happened."""

import datetime
import json
import logging
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from slipstream import figures, wire
from slipstream.core.sequence import Request, Sequence
from slipstream.engine.engine import Engine
from slipstream.engine.metric_set import Histogram
from slipstream.engine.reports import RequestLog, StatusLine
from slipstream.engine.scheduler import Limits
from slipstream.engine.telemetry import Telemetry
from slipstream.wire import CancelCause, FinishReason
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

MS = 1_000_000
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def make(telemetry: Telemetry | None = None, log: RequestLog | None = None, **options) -> Client:
    runner = CountingRunner(options.pop("num_blocks", 12), 4, **options)
    clock = time.monotonic_ns
    return Client(Engine(Limits(6, 24, 100), runner, Words(), "m", clock, telemetry, log))


def values(histogram: tuple[list[int], float]) -> int:
    return sum(histogram[0])


def sampling_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 14),
        temperature=1.0,
        seed=rng.getrandbits(32),
        n=rng.choice([1, 1, 1, 2, 3]),
        end_ids=tuple(rng.sample(range(61), 4)),
        stop_words=rng.choice([(), (b"ab",), (b"c",)]),
    )


PROBE = SamplingParams(max_tokens=1, temperature=0.0)


def live(client, rng):
    """Submit clients' requests and probes, cancel some; return how many were cancelled."""
    num_cancels = 0
    for _ in range(25):
        for _ in range(rng.randint(0, 3)):
            prompt = rng.choices(range(61), k=rng.randint(1, 18))
            number = client.submit(prompt, sampling_of(rng))
            if rng.random() < 0.1:
                cause = rng.choice(list(CancelCause))
                num_cancels += client.engine.cancel(client.name, number, cause)
        if rng.random() < 0.5:
            client.submit([rng.randrange(61)], PROBE, is_probe=True)
        client.step()
        if rng.random() < 0.3 and clients_of(client):
            number = rng.choice(list(clients_of(client)))[0]
            num_cancels += client.engine.cancel(client.name, number, CancelCause.STOP)
    client.drain()
    return num_cancels


def clients_of(client, are_probes=False):
    """Return the streams of clients, or those of probes."""
    return {key: stream for key, stream in client.streams.items() if stream.is_probe is are_probes}


@pytest.mark.parametrize("seed", range(12))
def test_metrics_agree_with_what_clients_got(seed):
    rng = random.Random(seed)
    client = make(Telemetry(3600.0), max_in_flight=rng.choice([1, 2]))
    num_cancels = live(client, rng)

    told = client.engine.figures()
    counters, histograms = told.counters, told.histograms
    ends = [stream.last.finished for stream in clients_of(client).values()]
    lengths = [end.num_output_tokens for end in ends]
    for reason in FinishReason:
        assert counters[f"finished:{reason}"] == sum(end.reason is reason for end in ends)
    assert counters["output_tokens"] == histograms["output_tokens"][1] == sum(lengths)
    assert values(histograms["output_tokens"]) == values(histograms["end_to_end_s"]) == len(ends)
    assert histograms["input_tokens"][1] == sum(end.num_input_tokens for end in ends)

    drawn = counters["output_tokens"] + counters["finished:end"]
    begun = [end for end in ends if end.perf.first_token_ns]
    assert values(histograms["first_token_s"]) == len(begun)
    assert values(histograms["first_token_s"]) + values(histograms["inter_token_s"]) == drawn
    assert counters["prompt_tokens"] == sum(end.num_input_tokens for end in begun)
    never = sum(not end.perf.first_scheduled_ns for end in ends)
    assert values(histograms["queue_s"]) == len(begun) + never

    batches = client.engine._runner.batches
    assert counters["steps"] == values(histograms["step_tokens"]) <= len(batches)
    computed = histograms["step_tokens"][1] + counters["probe_tokens:prompt"]
    assert computed == sum(batch.num_tokens for batch in batches)
    spent_s = counters["step_s:host"] + counters["step_s:device"]
    costs = sum(counters[f"cost:{reason}"] for reason in FinishReason)
    assert costs == pytest.approx(spent_s)
    probes = [stream.last.finished for stream in clients_of(client, are_probes=True).values()]
    for reason in FinishReason:
        assert counters[f"probe_finished:{reason}"] == sum(end.reason is reason for end in probes)
    assert counters["probe_tokens:output"] == sum(end.num_output_tokens for end in probes)
    probes_s = counters["probe_step_s:host"] + counters["probe_step_s:device"]
    assert counters["probe_cost"] == pytest.approx(probes_s)
    assert sum(told.samples["request_cost"]) <= costs * 1.000001  # a step may run as one ends

    requests = {number for number, _ in clients_of(client)}
    num_requests = values(histograms["asked_sequences"])
    assert num_requests == len(requests) == len(told.samples["request_cost"])
    assert histograms["asked_sequences"][1] == len(ends)
    assert histograms["request_output_tokens"][1] == sum(lengths)
    assert sum(counters[f"cancels:{cause}"] for cause in CancelCause) == num_cancels
    assert len(told.samples["cancel_to_free_s"]) == num_cancels
    assert all(0 <= seconds < 60 for seconds in told.samples["cancel_to_free_s"])
    assert told.gauges["active_requests"] == told.gauges["scheduled_sequences"] == 0
    status = client.engine.status()
    assert status.num_output_tokens == counters["output_tokens"]
    assert status.num_prompt_tokens == counters["prompt_tokens"]
    assert counters["preemptions"] == status.num_preemptions
    assert counters["prefix_hits"] <= counters["prefix_queries"]
    assert status.num_prefix_queries == counters["prefix_queries"]
    assert status.num_prefix_hits == counters["prefix_hits"]
    cache = client.engine._scheduler.cache
    assert told.gauges["cached_blocks"] == cache.num_cached == len(cache.index)
    evicted = sum(counters[f"evicted_blocks:{word}"] for word in figures.EVICTIONS)
    assert evicted == sum(cache.num_evicted.values())
    assert client.engine.figures().samples == {name: [] for name in figures.SAMPLES}


def test_all_that_is_told_is_listed_and_nothing_else():
    told = make().engine.figures()
    assert set(told.gauges) == set(figures.GAUGES)
    assert set(told.counters) == set(figures.counter_names())
    assert set(told.histograms) == set(figures.HISTOGRAMS)
    assert set(told.samples) == set(figures.SAMPLES)
    for name, (counts, _) in told.histograms.items():
        assert len(counts) == len(figures.HISTOGRAMS[name]) + 1
    status = make().engine.status()
    frame = wire.encode(msgspec.structs.replace(status, figures=told))
    assert wire.decode_bridge(frame).figures == told


def test_a_value_is_in_the_first_bucket_that_is_not_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (-5.0, 0.0, 1.0, 1.001, 2.0, 2.001):
        histogram.add(value)
    histogram.add(9.0, 10)
    assert histogram.counts == [3, 2, 11]
    assert histogram.sum == pytest.approx(1 + 1.001 + 2 + 2.001 + 90)


def test_times_between_tokens_are_those_of_each_sequence():
    telemetry, request = Telemetry(), Request(b"", wire.Submit(0, pack([1, 2]), GREEDY, 0))
    sequences = [Sequence(i, request, 0, pack([1, 2]), 0, 100, None) for i in range(6)]
    now_ns = 1000 * MS
    for sequence, ago_ms in zip(sequences, (20, 20, 20, 300, 2, None), strict=True):
        sequence.first_scheduled_ns = 400 * MS
        sequence.last_token_ns = 0 if ago_ms is None else now_ns - ago_ms * MS
    telemetry.tokens_sampled(sequences, now_ns)
    told = telemetry.figures({"active_requests": 1})
    counts, total = told.histograms["inter_token_s"]
    bounds = figures.HISTOGRAMS["inter_token_s"]
    assert {bounds[i]: count for i, count in enumerate(counts) if count} == {
        0.002: 1,
        0.025: 3,
        0.3: 1,
    }
    assert total == pytest.approx(0.362)
    assert told.histograms["first_token_s"][1] == pytest.approx(1.0)
    assert told.histograms["queue_s"][1] == pytest.approx(0.4)
    assert told.histograms["prefill_s"][1] == pytest.approx(0.6)
    assert told.counters["output_tokens"] == 6
    assert told.counters["prompt_tokens"] == 2


@pytest.fixture
def wall(monkeypatch):
    """Set the wall clock wrong by `hours`, under every name that code reads it by."""
    clock, real, real_ns = SimpleNamespace(hours=0), time.time, time.time_ns
    turned = {
        real: lambda: real() + 3600.0 * clock.hours,
        real_ns: lambda: real_ns() + 3600 * 10**9 * clock.hours,
    }
    for name, module in list(sys.modules.items()):
        if name == "time" or name.startswith("slipstream"):
            for attribute, value in list(vars(module).items()):
                if value is real or value is real_ns:
                    monkeypatch.setattr(module, attribute, turned[value])
    return clock


@pytest.mark.parametrize("hours", [1, -1])
def test_a_wall_clock_that_jumps_changes_no_duration(tmp_path, wall, hours):
    path, telemetry = tmp_path / "requests.jsonl", Telemetry()
    client = make(telemetry, RequestLog(path, telemetry))
    begin_ns = time.monotonic_ns()

    def ask(number: int, request_id: str, deadline_ns: int = 0) -> None:
        ids, arrival_ns, more = pack([1, 2]), time.monotonic_ns(), (deadline_ns, MS, request_id)
        client.engine.submit(client.name, wire.Submit(number, ids, GREEDY, arrival_ns, 2, *more))

    ask(0, "whole")
    wall.hours += hours  # from arrival to the first step
    client.engine.step()
    ask(1, "left")
    ask(2, "late", deadline_ns=begin_ns)
    while client.engine.has_work:
        wall.hours += hours
        if wall.hours == 4 * hours:
            client.engine.cancel(client.name, 1, CancelCause.CLIENT)
        client.engine.step()
    took_s = (time.monotonic_ns() - begin_ns) / 1e9
    histograms = client.engine.figures().histograms
    for name in (name for name in histograms if name.endswith("_s")):
        total = histograms[name][1]
        assert 0 < total < values(histograms[name]) * took_s, name
    by_id = {line["id"]: line for line in lines(path)}
    reasons = {key: line["finish_reasons"] for key, line in by_id.items()}
    assert reasons == {"whole": ["length"], "left": ["cancelled"], "late": ["deadline"]}
    for line in by_id.values():
        assert 0 < line["end_to_end_s"] < took_s
    for key in ("whole", "left"):
        queue_s, first_s, end_s = (
            by_id[key][name] for name in ("queue_s", "first_token_s", "end_to_end_s")
        )
        assert 0 < queue_s <= first_s <= end_s
    when = datetime.datetime.fromisoformat(by_id["whole"]["time"]).timestamp()
    assert abs(when - time.time()) < 60


def test_what_runs_and_waits_is_told_without_probes():
    names = "running waiting active_requests waiting_requests waiting_tokens preempted_sequences"
    client = make()

    def told() -> list[float]:
        gauges = client.engine.figures().gauges
        return [gauges[name] for name in names.split()]

    long = SamplingParams(max_tokens=20, temperature=0.0)
    client.submit([1, 2, 3], long)
    client.submit([4], PROBE, is_probe=True)
    assert told() == [0, 1, 1, 1, 3, 0]
    client.step()
    assert told() == [1, 0, 1, 0, 0, 0]
    client.submit([5], PROBE, is_probe=True)
    assert told() == [1, 0, 1, 0, 0, 0]
    status = client.engine.status()
    assert status.running + status.waiting > 1  # of which probes are a part
    client.drain()
    assert told() == [0] * 6


def test_time_without_work_is_nobodys():
    client = make(Telemetry(3600.0))
    client.submit([1, 2], GREEDY)
    client.drain()
    before = client.engine.figures().counters
    time.sleep(1.0)
    client.submit([1, 2], GREEDY)
    client.drain()
    after = client.engine.figures().counters
    for name in ("cost:length", "step_s:host", "step_s:device"):
        assert after[name] - before[name] < 0.9


def test_a_cancel_is_free_only_when_no_step_holds_its_blocks():
    client = make(max_in_flight=2)
    number = client.submit([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))
    for _ in range(4):
        client.step()
    noticed_ns = time.monotonic_ns() - 50 * MS
    assert client.engine._steps, "nothing is in flight: the test shows nothing"
    client.engine.cancel(client.name, number, CancelCause.CLIENT, noticed_ns)
    assert client.engine.figures().samples["cancel_to_free_s"] == []
    client.drain()
    [seconds] = client.engine.figures().samples["cancel_to_free_s"]
    assert seconds >= 0.05


# --- reports -------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_request_log_has_a_line_a_request_and_nothing_of_what_was_said(tmp_path):
    path, telemetry = tmp_path / "requests.jsonl", Telemetry(7200.0)
    client = make(telemetry, RequestLog(path, telemetry))

    def ask(number: int, request_id: str, sampling: SamplingParams, deadline_ns: int = 0) -> None:
        message = wire.Submit(
            number,
            pack([41, 42, 43]),
            sampling,
            time.monotonic_ns(),
            2,
            deadline_ns,
            MS,
            request_id,
            "bls",
        )
        client.engine.submit(client.name, message)

    evil = 'a"b\\\n{"id": 1}\x1b[31m\x7f\x9b\u2028' + "x" * 100
    ask(0, evil, msgspec.structs.replace(GREEDY, n=2))
    while client.engine.has_work:
        client.engine.step()
    [line] = lines(path)
    raw = path.read_bytes()
    assert raw.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in raw[:-1])
    assert line["id"] == evil[:64]
    assert (line["model"], line["priority"], line["num_input_tokens"]) == ("bls", 2, 3)
    assert line["num_output_tokens"] == [6, 6]
    assert line["finish_reasons"] == ["length", "length"]
    assert line["cancel_cause"] is None
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["end_to_end_s"]
    assert line["cost"] == pytest.approx(2 * line["device_s"], rel=0.01, abs=1e-5)
    assert not {"prompt", "text", "token_ids", "input_ids"} & set(line)

    path.rename(tmp_path / "rotated")
    ask(1, "gone", SamplingParams(max_tokens=20, temperature=0.0))
    for _ in range(5):
        client.engine.step()
    client.engine.cancel(client.name, 1, CancelCause.UNACKNOWLEDGED)
    ask(2, "late", GREEDY, deadline_ns=time.monotonic_ns() - 1)
    while client.engine.has_work:
        client.engine.step()
    by_id = {line["id"]: line for line in lines(path)}
    assert by_id["gone"]["finish_reasons"] == ["cancelled"]
    assert by_id["gone"]["cancel_cause"] == "unacknowledged"
    assert 0 < by_id["gone"]["num_output_tokens"][0] < 20
    assert by_id["late"]["finish_reasons"] == ["deadline"]
    assert by_id["late"]["cancel_cause"] == "deadline"
    assert by_id["late"]["queue_s"] is None
    assert by_id["late"]["first_token_s"] is None
    assert len(lines(tmp_path / "rotated")) == 1


def test_a_request_log_that_cannot_be_written_stops_nobody(tmp_path, capfd):
    with pytest.raises(OSError, match="no/such"):
        RequestLog(tmp_path / "no" / "such" / "file", Telemetry())
    telemetry = Telemetry()
    client = make(telemetry, RequestLog(Path("/dev/full"), telemetry))
    client.submit([1], GREEDY)
    client.drain()
    assert "No space left on device" in capfd.readouterr().err


def test_the_status_line_comes_every_ten_seconds_while_there_is_or_was_work(caplog):
    caplog.set_level(logging.INFO)
    base = make().engine.status()
    line = StatusLine(100.0)

    def tick(now_s: float, **changes: int) -> list[str]:
        caplog.clear()
        line.tick(msgspec.structs.replace(base, **changes), now_s)
        return caplog.messages

    assert tick(105.0, running=3) == []
    assert tick(110.0) == []  # idle
    busy = {"running": 3, "waiting": 2, "kv_blocks_free": 9, "kv_blocks_total": 12}
    so_far = {"num_output_tokens": 400, "num_prompt_tokens": 90, "num_preemptions": 1}
    so_far |= {"num_prefix_queries": 80, "num_prefix_hits": 60}
    assert tick(119.9, **busy, **so_far) == []
    assert tick(120.0, **busy, **so_far) == [
        "3 running, 2 waiting, KV cache 25.0 % used, 40.0 tok/s generated, 9.0 tok/s of prompts, "
        "75.0 % of prompts found in the cache, 1 preemptions"
    ]
    [was] = tick(130.0, **so_far | {"num_output_tokens": 500})
    assert was.startswith("0 running, 0 waiting, KV cache 0.0 % used, 10.0 tok/s generated, 0.0")
    assert tick(140.0, **so_far | {"num_output_tokens": 500}) == []
    assert len(tick(150.0, waiting=1, **so_far | {"num_output_tokens": 500})) == 1
