"""The arithmetic of `slipstream bench`, against slow and plain reckoning."""

import json
import math
import re
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_client.bench import load, messages, plots, price, report, transports
from slipstream_client.bench.figures import MeasuredWindow, Objectives, cost, figures, summary
from slipstream_client.bench.messages import Record
from slipstream_contract.errors import Code, ContractError

MS = 1_000_000
SECOND = 1_000_000_000


def record(due_ms: float, responses: list[tuple[float, int]], code: str = "") -> Record:
    """A request due at `due_ms`; (ms after the one before, tokens) of each response."""
    times = np.cumsum([ms for ms, _ in responses]) + due_ms
    whole = array("q", [round(t * MS) for t in times])
    counts = array("i", [count for _, count in responses])
    ended = whole[-1] if whole else round(due_ms * MS)
    return Record(
        *(0, round(due_ms * MS), round(due_ms * MS), ended, whole.tobytes(), counts.tobytes()),
        code=code,
    )


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two neighbours, as everybody's."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.lists(st.tuples(st.integers(1, 500), st.integers(1, 5)), max_size=6),
        st.sampled_from(["", "", "", "INTERNAL", "UNAVAILABLE"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "ttft": st.integers(1, 400),
        "itl": st.integers(1, 400),
        "e2e": st.integers(1, 2000),
    },
)


@given(requests=REQUESTS, begin=st.integers(0, 1000), length=st.integers(1, 2500), limits=LIMITS)
def test_figures_are_those_of_plain_reckoning(requests, begin, length, limits):
    records = []
    for due, responses, code, is_refused in requests:
        records.append(record(due, responses, code))
        records[-1].is_refused = is_refused and code == "UNAVAILABLE" and not responses
    end = begin + length
    found = figures(records, MeasuredWindow(begin * MS, end * MS), Objectives(limits), None)

    offered = [(r, e) for r, e in zip(requests, records, strict=True) if begin <= r[0] < end]
    whole = [r for r, e in offered if r[1] and not r[2]]
    ttft = [float(responses[0][0]) for _, responses, _, _ in whole]
    e2e = [float(sum(ms for ms, _ in responses)) for _, responses, _, _ in whole]
    gaps = [float(ms) for _, responses, _, _ in whole for ms, _ in responses[1:]]
    itl = [ms / n for _, responses, _, _ in whole for ms, n in responses[1:] for _ in range(n)]
    tpot = [
        sum(ms for ms, _ in responses[1:]) / sum(n for _, n in responses[1:])
        for _, responses, _, _ in whole
        if len(responses) > 1
    ]
    for name, values in {"ttft": ttft, "e2e": e2e, "gap": gaps, "itl": itl, "tpot": tpot}.items():
        got = found[f"{name}_ms"]
        assert set(got) == ({"mean", "max", "p50", "p90", "p95", "p99"} if values else set())
        for p in (50, 90, 95, 99) if values else ():
            assert got[f"p{p}"] == pytest.approx(percentile(values, p), abs=2e-3)
    refused = sum(e.is_refused for _, e in offered)
    assert (found["requests"], found["completed"]) == (len(offered), len(whole))
    assert (found["refused"], found["failed"]) == (refused, len(offered) - len(whole) - refused)
    assert sum(found["errors"].values()) == found["failed"]

    seconds = length / 1e3
    arrived = [
        (due + sum(ms for ms, _ in responses[: i + 1]), n)
        for due, responses, _, _ in requests
        for i, (_, n) in enumerate(responses)
    ]
    inside = [n for at, n in arrived if begin <= at < end]
    assert found["tokens_per_s"] == pytest.approx(sum(inside) / seconds, abs=1e-3)
    assert found["responses_per_s"] == pytest.approx(len(inside) / seconds, abs=1e-3)
    ends = [(r, r[0] + sum(ms for ms, _ in r[1])) for r in requests if r[1] and not r[2]]
    ended = [r for r, at in ends if begin <= at < end]
    assert found["requests_per_s"] == pytest.approx(len(ended) / seconds, abs=1e-3)
    if limits:
        share = sum(is_good(r, limits) for r in whole) / len(offered) if offered else 0
        rate = sum(is_good(r, limits) for r in ended) / seconds
        assert found["goodput"]["share"] == pytest.approx(share, abs=1e-3)
        assert found["goodput"]["requests_per_s"] == pytest.approx(rate, abs=1e-3)


def is_good(request, limits: dict[str, float]) -> bool:
    _, responses, _, _ = request
    after = sum(n for _, n in responses[1:])
    took = {
        "ttft": responses[0][0],
        "e2e": sum(ms for ms, _ in responses),
        "itl": sum(ms for ms, _ in responses[1:]) / after if after else 0,
    }
    return all(took[name] <= limit + 1e-9 for name, limit in limits.items())


def test_figures_worked_out_by_hand():
    # Two tokens at 10 ms, one 20 ms later, then four together 40 ms later: 10 ms each.
    one = record(100, [(10, 2), (20, 1), (40, 4)])
    found = figures([one], MeasuredWindow(0, SECOND), Objectives({"ttft": 10, "itl": 12}), 36.0)
    assert found["ttft_ms"]["p50"] == 10
    assert found["e2e_ms"]["max"] == 70
    assert (found["gap_ms"]["mean"], found["gap_ms"]["max"]) == (30, 40)
    assert (found["itl_ms"]["p50"], found["itl_ms"]["max"]) == (10, 20)
    assert found["tpot_ms"]["mean"] == 12
    assert (found["tokens_per_s"], found["responses_per_s"]) == (7, 3)
    assert found["tokens_per_response"] == pytest.approx(7 / 3, abs=1e-3)
    assert found["goodput"] == {
        "objectives_ms": {"ttft": 10, "itl": 12},
        "good": 1,
        "share": 1.0,
        "requests_per_s": 1.0,
    }
    assert found["cost"] == {
        "price_per_hour": 36.0,
        "per_request": pytest.approx(0.01),
        "per_million_output_tokens": pytest.approx(0.01 / 7 * 1e6),
    }


def test_the_seconds_of_a_short_load_are_those_of_its_rates():
    found = figures(
        [record(0.0, [(10.0, 1), (31.498, 40)])], MeasuredWindow(0, 41_498_000), Objectives({}), 1.0
    )
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(1, rel=1e-4)


def test_a_late_send_counts_as_latency():
    late = record(100, [(250, 1)])
    late.sent_ns = 300 * MS  # the tool itself was 200 ms late
    found = figures([late], MeasuredWindow(0, SECOND), Objectives({}), None)
    assert found["ttft_ms"]["p50"] == 250
    assert found["lag_ms"]["max"] == 200


def test_each_request_counts_once():
    refused = record(10, [], "UNAVAILABLE")
    refused.is_refused, refused.num_tries, refused.sent_ns = True, 3, 15 * MS
    refused.ended_ns = 17 * MS
    broken, empty = record(20, [(5, 1)], "INTERNAL"), record(30, [])
    late = record(100, [(1, 1)])  # due at the end of the window, which is outside
    on_time = record(50, [(50, 1)])  # its token comes there
    records = [refused, broken, empty, late, on_time]
    found = figures(records, MeasuredWindow(0, 100 * MS), Objectives({"e2e": 50}), None)
    assert (found["requests"], found["completed"]) == (4, 1)
    assert (found["refused"], found["failed"], found["retries"]) == (1, 2, 2)
    assert found["errors"] == {"INTERNAL": 1, "EMPTY": 1}
    assert found["refusal_ms"]["p50"] == 2
    assert found["lag_ms"]["max"] == 0  # a second try is not the tool's delay
    assert (found["requests_per_s"], found["tokens_per_s"]) == (0, 10)  # the broken one's token
    assert found["goodput"]["share"] == 0.25


def test_of_nothing_nothing_is_said():
    found = figures([], MeasuredWindow(0, SECOND), Objectives({"e2e": 1}), 1.0)
    assert found["ttft_ms"] == {}
    assert found["goodput"]["share"] == 0
    assert found["cost"] == {"price_per_hour": 1.0}
    assert summary([]) == {}
    assert "per_request" not in cost(1.0, MeasuredWindow(0, SECOND), 0, 0)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:inf", "p99:3", ":3"])
def test_objectives_that_mean_nothing(word):
    with pytest.raises(ContractError, match=re.escape(repr(word))):
        Objectives.parse([word])


# --- load ----------------------------------------------------------------------------------------


@given(
    arrivals=st.sampled_from(load.ARRIVALS),
    rate=st.floats(0.1, 1000),
    burst=st.integers(1, 20),
    size=st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_schedules(arrivals, rate, burst, size, seed):
    due = load.schedule(arrivals, rate, burst, size, np.random.default_rng(seed))
    assert len(due) == size
    assert (np.diff(due) >= 0).all()
    assert due[0] >= 0
    again = load.schedule(arrivals, rate, burst, size, np.random.default_rng(seed))
    assert (due == again).all()
    if arrivals == "even":
        assert np.allclose(due, np.arange(size) / rate * 1e9, atol=1)
    if arrivals == "bursts":
        for first in range(0, size, burst):
            assert len(set(due[first : first + burst].tolist())) == 1


@pytest.mark.parametrize(("arrivals", "burst"), [("poisson", 1), ("bursts", 10)])
def test_arrivals_come_at_the_rate_and_independently(arrivals, burst):
    due = load.schedule(arrivals, 50.0, burst, 100_000, np.random.default_rng(0)) / 1e9
    assert len(due) / due[-1] == pytest.approx(50, rel=0.05)
    pauses = np.diff(due[::burst])
    assert pauses.std() == pytest.approx(pauses.mean(), rel=0.05)  # an exponential's
    assert (pauses > pauses.mean()).mean() == pytest.approx(math.exp(-1), abs=0.02)


def test_lengths():
    rng = np.random.default_rng(0)
    assert load.lengths("x", "7").sample(rng, 3).tolist() == [7, 7, 7]
    assert set(load.lengths("x", "uniform:3:5").sample(rng, 500).tolist()) == {3, 4, 5}
    drawn = load.lengths("x", "lognormal:100:0.8:400").sample(rng, 20_000)
    assert (drawn.min() >= 1, drawn.max() <= 400) == (True, True)
    assert np.log(
        load.lengths("x", "lognormal:100:0.5").sample(rng, 20_000)
    ).std() == pytest.approx(0.5, rel=0.05)
    assert load.lengths("x", "lognormal:9:0:9").sample(rng, 5).tolist() == [9] * 5


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "1.5", "16777217", "uniform:5:3", "uniform:1", "uniform:0:3"),
        *("lognormal:8", "lognormal:8:-1", "lognormal:8:nan", "lognormal:9:1:8", "zipf:3"),
    ],
)
def test_lengths_that_mean_nothing(text):
    with pytest.raises(ContractError, match=f"--input-len is {re.escape(repr(text))}"):
        load.lengths("--input-len", text)


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"text_input": "b"}\n')
    assert load.read_prompts(file, "ensemble") == [load.Prompt("a", 3), load.Prompt("b")]
    file.write_text('{"input_ids": [1, 2]}\n')
    assert load.read_prompts(file, "tensorrt_llm") == [load.Prompt([1, 2])]
    for text, said in {
        "{": "no JSON",
        "3": "no JSON|not a JSON object",
        '{"prompt": ""}': "no prompt",
        '{"prompt": [1]}': "no prompt",
        '{"prompt": "a", "top_k": 2}': "'top_k'",
        '{"prompt": "a", "max_tokens": 0}': "max_tokens is 0",
        '{"prompt": "a", "max_tokens": true}': "max_tokens is True",
        '{"input_ids": [1]}': "'input_ids'",
        "": "contains no prompt",
    }.items():
        file.write_text(text)
        with pytest.raises(ContractError, match=said):
            load.read_prompts(file, "ensemble")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "vllm_model", "tensorrt_llm"])
def test_requests_over_http_name_inputs_of_the_model(model):
    from slipstream_contract.tensors import MODELS

    prompt = [1, 2] if model == "tensorrt_llm" else "a"
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    body = json.loads(load.RequestMaker("http", model, sampling, False).payload(prompt, 5, ""))
    assert set(body) <= {tensor.name for tensor in MODELS[model].inputs}
    given = json.loads(body["sampling_parameters"]) if model == "vllm_model" else body
    assert given["temperature"] == 0.5
    assert 5 in (given.get("max_tokens"), given.get("request_output_len"))
    with pytest.raises(ContractError, match="no_such"):
        load.RequestMaker("http", "ensemble", {"no_such": 1}, False).payload("a", 5, "")


# --- what clients read and say -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "code", "is_refused"),
    [
        ("UNAVAILABLE: the engine is full: retry_after_ms: 180", "UNAVAILABLE", "UNAVAILABLE", 1),
        ("in ensemble 'ensemble', UNAVAILABLE: full", "INTERNAL", "UNAVAILABLE", 1),
        ("[request id: 3] Exceeds maximum queue size", "UNAVAILABLE", "UNAVAILABLE", 1),
        ("failed to connect: UNAVAILABLE: ipv4:127.0.0.1:1: x", "UNAVAILABLE", "UNAVAILABLE", 0),
        ("INVALID_ARGUMENT: top_p is 2", "INTERNAL", "INVALID_ARGUMENT", 0),
        ("Deadline Exceeded", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", 0),
    ],
)
def test_refusals_are_distinguished_from_errors(text, status, code, is_refused):
    answer = Record(0, 0, 0)
    transports.fail(answer, text, status)
    assert (answer.code, answer.is_refused) == (code, bool(is_refused))
    begun = record(0, [(1, 1)])
    transports.fail(begun, text, status)
    assert not begun.is_refused  # it had tokens: it is broken, not refused


def test_retry_after():
    assert transports.retry_after_s("full; retry_after_ms: 180") == 0.18
    assert transports.retry_after_s("full") is None


@given(st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=40)), max_size=5))
def test_messages_survive_the_pipe(tmp_path_factory, jobs):
    sent = [
        messages.WorkerPlan(
            *("grpc", "a:1", "m", [messages.Job(i, i, data) for i, data in jobs], [b"w"]),
            *(2, True, 1.5, 3),
        ),
        messages.Done([record(1, [(1, 2)], Code.INTERNAL)], 1.0, 2.0, 0.5, [0.1]),
    ]
    file = tmp_path_factory.mktemp("pipe") / "frames"
    with file.open("wb") as pipe:
        for message in sent:
            messages.write(pipe, message)
    with file.open("rb") as pipe:
        assert [messages.read(pipe), messages.read(pipe), messages.read(pipe)] == [*sent, None]


def test_the_price_among_metrics():
    text = '# TYPE slipstream_gpu_hour_price gauge\nslipstream_gpu_hour_price{model="a"} 0\n'
    assert price.price_in(text) is None
    assert price.price_in(text + 'slipstream_gpu_hour_price{model="b"} 2.5\n') == 2.5
    assert price.price_in("slipstream_gpu_hour_price 3\n") == 3
    assert price.price_in("slipstream_gpu_hour_price NaN\nslipstream_gpu_hour_price x") is None
    assert price.price_per_hour("http://127.0.0.1:1/metrics") is None


# --- pictures ------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=9), st.booleans())
def test_axes_hold_their_values(values, is_log):
    axis = plots.fit_axis("x", values, is_log)
    for value in values:
        assert -1e-6 <= axis.place(value) <= 1 + 1e-6
    assert 2 <= len(axis.ticks) <= 12
    assert len({axis.show(tick) for tick in axis.ticks}) == len(axis.ticks)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_frontier_holds_whoever_is_not_beaten(places):
    def is_beaten(a):
        return any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in places)

    assert report.frontier(places) == sorted({a for a in places if not is_beaten(a)})
