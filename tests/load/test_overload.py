"""A short overload of a real server, and what a long one would find."""

import dataclasses
from array import array

import pytest
from slipstream_client.bench.figures import MeasuredWindow
from slipstream_client.bench.messages import Record
from slipstream_serve.server import server_directory

NAMES = ("serving", "soak_watch", "overload", "isolation")
S = 10**9


@pytest.mark.triton
@pytest.mark.rest
def test_a_few_seconds_of_ten_times_too_much(load, tmp_path):
    """Nothing is said of rates here: the machine may do anything else meanwhile."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    load.overload._RAMP_S = 1.0
    bounds = ["--max-num-seqs", "4", "--max-waiting", "8", "--max-tokens", "64"]
    times = ["--seconds", "3", "--peak-seconds", "3", "--timeout-ms", "20000"]
    args = load.overload.parse([*bounds, *times])
    with load.overload.serving(args, tmp_path / "log") as server:
        result = load.overload.measure(args, server)
    told = load.overload.table(result)
    assert result["refused"] > result["accepted"] > 0, told
    assert result["late"] == 0, told
    assert set(result["ends"]) <= {"whole", "DEADLINE_EXCEEDED"}, result
    assert result["goodput_tokens_per_s"] > 0, told
    assert {"tritonserver", "engine", "tensorrt_llm"} < result["processes"].keys()


def whole(begin_s: float, end_s: float, num_tokens: int = 100) -> Record:
    times = array("q", [int(end_s * S)]).tobytes()
    counts = array("i", [num_tokens]).tobytes()
    begin = int(begin_s * S)
    return Record(0, begin, begin, int(end_s * S), times, counts)


def refused(begin_s: float, took_s: float) -> Record:
    begin = int(begin_s * S)
    end = int((begin_s + took_s) * S)
    return Record(0, begin, begin, end, code="UNAVAILABLE", is_refused=True)


GOOD = [whole(i, i + 2.0) for i in range(10)] + [refused(i / 10, 0.01) for i in range(100)]


def judge(load, records, peak=100.0):
    limits = load.overload.Limits(goodput=0.9, refusal_ms=150.0, timeout_s=5.0)
    return load.overload.judge(peak, records, MeasuredWindow(0, 10 * S), limits)


def test_a_good_run_has_no_problems(load):
    result, problems = judge(load, GOOD, peak=85.0)
    assert problems == []
    assert result["goodput_tokens_per_s"] == 80.0  # those that ended within the window
    assert result["goodput_tenths"] == [0, 0, *[100] * 8]
    assert (result["accepted"], result["refused"], result["ends"]) == (10, 100, {"whole": 10})


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([refused(1, 0.2)] * 3, "refusals took 200 ms"),
        ([whole(1, 8.0)], "1 accepted requests went past their deadline"),
        ([Record(0, 0, 0, S, code="INTERNAL", message="lost")], "{'INTERNAL': 1}, the first: lost"),
    ],
)
def test_what_a_run_must_not_have(load, bad, words):
    _, problems = judge(load, GOOD + bad, peak=85.0)
    assert len(problems) == 1
    assert words in problems[0]


def test_too_little_is_served_or_nothing_was_refused(load):
    assert "is 80.0% of the peak" in judge(load, GOOD)[1][0]
    assert "no overload" in judge(load, GOOD[:10], peak=85.0)[1][0]


def test_a_process_that_grows_or_ends_is_seen(load):
    process = load.soak_watch.Process(rss_mib=100.0)
    flat = [({"engine": process, "stub": process}, {"engine": float(i)}) for i in range(12)]

    def growth(samples):
        watch = object.__new__(load.overload.Watch)
        watch.samples = [(load.soak_watch.Held(held), used) for held, used in samples]
        return watch.growth()

    problems, rows = growth(flat)
    assert problems == []
    assert rows["engine"] == (100.0, 100.0, 0.5)
    more = dataclasses.replace(process, rss_mib=107.0)
    grown = flat[:9] + [({"engine": more, "stub": process}, used) for _, used in flat[9:]]
    assert growth(grown)[0] == ["engine: grew from 100.0 to 107.0 MiB"]
    ended = [*flat[:11], ({"engine": process}, {"engine": 11.0})]
    assert "stub: ended" in growth(ended)[0]


# --- isolation ------------------------------------------------------------------------------------


def test_time_between_tokens_is_told_by_what_went_on(load):
    span = load.isolation.Span
    ticks = [int(i * 0.01 * S) for i in range(100)]
    ticks += [ticks[-1] + int((i + 1) * 0.05 * S) for i in range(20)]
    times = array("q", ticks).tobytes()
    record = Record(0, 0, 0, ticks[-1], times, array("i", [1] * len(ticks)).tobytes())
    spans = [span("usual", 0, S), span("long", S, 2 * S)]
    usual = load.isolation.figures([record], spans, "usual")
    long = load.isolation.figures([record], spans, "long")
    assert (usual["p50"], usual["p99"], usual["tokens"]) == (10.0, 10.0, 99)
    assert (long["p50"], long["span_s"]) == (50.0, 1.0)
    args = load.isolation.parse([])
    found = {"usual": usual, "long": long}
    problems = load.isolation.conclude(args, found, [("ensemble grpc", 1.5, "nothing")])["problems"]
    assert problems == [
        "long: 50.0 ms between tokens (p99), usually 10.0",
        "ensemble grpc: refused after 1.50 s",
        "ensemble grpc: 'nothing' is no refusal",
    ]
