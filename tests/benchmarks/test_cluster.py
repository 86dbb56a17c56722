"""The simulator of a cluster: near the engine itself, and right where the answer is known."""

import importlib
import statistics
from itertools import pairwise

import pytest

NAMES = (
    "shapes",
    "workloads",
    "limits",
    "step_times",
    "traces",
    "simulated",
    "recorded_load",
    "replicas",
    "cluster",
    "forecast",
)
pytestmark = pytest.mark.usefixtures("bench")


def module(name: str):
    return importlib.import_module(name)


def alone(rate: float, seed: int) -> tuple[list[object], object]:
    """A trace on one replica: its requests, and the trace."""
    replicas, traces = module("replicas"), module("traces")
    trace = traces.trace("poisson", rate, seed)
    (replica,) = replicas.make(replicas.Shaped())
    requests = [replicas.Request(each) for each in trace.arrivals]
    for request in requests:
        replica.submit(request)
    replica.advance(1e9)
    assert (replica.load, replica.used, replica.context) == (0, 0, 0)
    return requests, trace


@pytest.mark.rest
@pytest.mark.parametrize("rate", [8.0, 28.0])
def test_a_replica_is_near_the_real_engine_over_the_same_steps(rate):
    simulated, step_times = module("simulated"), module("step_times")
    scheduler = importlib.import_module("slipstream.engine.scheduler")
    requests, trace = alone(rate, 1)
    limits = scheduler.Limits(simulated.MAX_ROWS, 2048)
    answers = simulated.slipstream(trace, step_times.times_of("8b"), limits)
    first = [1e3 * (each.first_s - each.arrival.due_s) for each in requests]
    theirs = answers.first_ms()
    assert statistics.median(first) == pytest.approx(statistics.median(theirs), rel=0.2)
    cut = [statistics.quantiles(each, n=10)[-1] for each in (first, theirs)]
    assert cut[0] == pytest.approx(cut[1], rel=0.1)
    whole = sum(each.end_s - each.first_s for each in requests)
    assert whole == pytest.approx(sum(t[-1] - t[0] for t in answers.times), rel=0.01)


def test_every_request_gets_its_tokens_in_order_and_no_step_is_free():
    requests, trace = alone(20.0, 4)
    for request in requests:
        assert request.arrival.due_s < request.first_s <= request.end_s
    busy = sum(each.num_output for each in trace.arrivals)
    assert max(each.end_s for each in requests) > busy / 256 * 0.005


def test_a_prefix_is_found_where_it_was_and_evicted_when_room_is_needed():
    replicas, traces = module("replicas"), module("traces")
    (replica,) = replicas.make(replicas.Shaped())
    turns = [traces.Arrival(0.0, 1000, 10), traces.Arrival(5.0, 1500, 10)]
    requests = [replicas.Request(each, "chat", n) for each, n in zip(turns, (0, 1010), strict=True)]
    for request in requests:
        replica.submit(request)
        replica.advance(request.arrival.due_s + 4)
    assert [each.num_cached for each in requests] == [0, 1010]
    replica.kv_tokens = 2000
    other = replicas.Request(traces.Arrival(10.0, 1200, 10), "other")
    again = replicas.Request(traces.Arrival(20.0, 1500, 10), "chat", 1010)
    for request in (other, again):
        replica.submit(request)
        replica.advance(request.arrival.due_s + 4)
    assert again.num_cached == 0


def test_policies_do_what_they_are_named_for():
    """By means of three loads that were drawn."""
    cluster, replicas = module("cluster"), module("replicas")
    found, busiest, first_p99 = {}, {}, {}
    for policy in ("random", "least", "prefix"):
        served = []
        for seed in (1, 2, 3):
            made = [replicas.make(replicas.Shaped())[0] for _ in range(4)]
            router, requests = cluster.Router(policy, made, 1), cluster.chats(40.0, 8.0, 120, seed)
            cluster.run(router, requests)
            served.append(cluster.served(policy, 4, router, requests))
        found[policy] = statistics.fmean(each.found for each in served)
        busiest[policy] = statistics.fmean(each.busiest for each in served)
        first_p99[policy] = statistics.fmean(each.first_p99 for each in served)
    assert found["prefix"] > 2 * found["least"]
    assert busiest["least"] < 0.95 * busiest["random"]
    assert first_p99["prefix"] < 0.7 * first_p99["random"]


def test_ranks_of_tensors_are_faster_and_less_than_n_times_and_stages_hold_more():
    replicas = module("replicas")
    times = [
        replicas.rank_times(replicas.Shaped(tensor=n)).step_ms(32, 8000, []) for n in (1, 2, 4)
    ]
    for one, two in pairwise(times):
        assert one / 2 < two < one
    one, two = (replicas.Shaped(pipeline=n) for n in (1, 2))
    assert len(replicas.make(two)) == 2
    assert 2 * two.kv_tokens() > 2 * one.kv_tokens()


@pytest.mark.parametrize(("shape", "is_fp8"), [("8b", False), ("70b", True), ("70b", False)])
def test_ranks_make_a_step_faster_but_not_by_their_number(shape, is_fp8):
    forecast = module("forecast")
    for batch in (1, 32, 128):
        by_ranks = [forecast.step_ms(shape, is_fp8, size, 1, batch) for size in (1, 2, 4, 8)]
        assert all(1 < a / b < 2 for a, b in pairwise(by_ranks))
        halves = forecast.step_ms(shape, is_fp8, 2, 2, batch)
        assert by_ranks[2] < halves < by_ranks[0]
    assert forecast.step_ms("70b", True, 4, 1, 1) < forecast.step_ms("70b", False, 4, 1, 1)


def hot(rate: float, seconds: float, num_prefix: int):
    """Requests that all begin with one long prefix, at even distances."""
    replicas, traces = module("replicas"), module("traces")
    count = round(rate * seconds)
    return [
        replicas.Request(traces.Arrival(at / rate, num_prefix + 100, 60), "all", num_prefix)
        for at in range(count)
    ]


@pytest.mark.parametrize("draw", ["chats", "hot"])
def test_the_routing_of_replicas_finds_prefixes_and_keeps_the_balance(draw):
    """Beside taking turns: `replicas` is what `--replicas` chooses by."""
    replicas, cluster = module("replicas"), module("cluster")
    rows = {}
    for policy in ("turns", "slipstream"):
        requests = cluster.chats(70.0, 5.0, 480, 1) if draw == "chats" else hot(160.0, 4.0, 3000)
        router = cluster.Router(
            policy, [r for _ in range(8) for r in replicas.make(replicas.Shaped())]
        )
        cluster.run(router, requests)
        rows[policy] = cluster.served(policy, 8, router, requests)
    ours, turns = rows["slipstream"], rows["turns"]
    assert ours.busiest < 1.3
    assert ours.first_p50 <= turns.first_p50
    if draw == "chats":
        assert ours.found > 3 * turns.found
        assert ours.first_p99 < turns.first_p99
    else:
        assert ours.found >= turns.found - 0.01


def test_a_recorded_load_is_served_at_the_rate_wanted():
    cluster, recorded = module("cluster"), module("recorded_load")
    draw = cluster.drawn_of(recorded.CHATS)
    requests = draw(40.0, 500.0, 0, 0)  # the whole hour
    assert len(requests) == pytest.approx(20_000, rel=0.05)
    del requests[300:]
    assert {request.prefix for request in requests} == {""}
    one, *_ = recorded.read()
    assert requests[0].arrival == one
    router = cluster.Router("least", [module("replicas").make(module("replicas").Shaped())[0]])
    cluster.run(router, requests)
    assert all(request.first_s > request.arrival.due_s for request in requests)
