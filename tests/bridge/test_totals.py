"""Sums of what engines count: they follow one engine, and never fall when another takes over."""

from slipstream import wire
from slipstream.bridge.families import Kind, engine_metrics
from slipstream.bridge.totals import Totals
from slipstream.figures import COUNTERS, GAUGES, HISTOGRAMS, SAMPLES, counter_names


def status(pid: int, steps: float, counts: list[int], total: float) -> wire.Status:
    figures = wire.Figures(
        {"start_time_s": 1.0}, {"steps": steps}, {"queue_s": (counts, total)}, {}
    )
    return wire.Status(0, "m", pid, 1, 1, 0, 0, 0.0, 0, 0, [], figures=figures)


def test_sums_follow_engines():
    totals = Totals()
    seen = []

    def advance(*what) -> None:
        totals.advance(status(*what))
        names = ("steps", "queue_s#0", "queue_s#1", "queue_s#sum", "engine_restarts")
        seen.append(tuple(totals.values[name] for name in names))

    advance(7, 100, [5, 6], 2.0)  # what was before is not ours to tell
    advance(7, 110, [5, 8], 2.5)
    advance(7, 110, [5, 8], 2.5)
    advance(8, 3, [1, 0], 0.25)
    advance(8, 4, [1, 1], 0.5)
    assert seen == [
        (0, 0, 0, 0, 0),
        (10, 0, 2, 0.5, 0),
        (10, 0, 2, 0.5, 0),
        (13, 1, 2, 0.75, 1),
        (14, 1, 3, 1.0, 1),
    ]


def test_every_figure_is_published_and_every_metric_has_a_figure():
    metrics = engine_metrics("m", 32, 48)
    derived = {
        *("running", "waiting", "kv_blocks_free", "kv_blocks_used", "kv_blocks_total", "kv_usage"),
        *("reused_blocks", "last_step_age_s", "answer_age_s", "now_s", "zero", "one"),
        *("engine_restarts", "repairs:model", "repairs:server"),
    }
    places = {
        Kind.GAUGE: {*GAUGES, *counter_names(), *derived},
        Kind.COUNTER: {*counter_names(), *derived},
        Kind.BUCKETS: set(HISTOGRAMS),
        Kind.OBSERVED: set(SAMPLES),
    }
    for metric in metrics:
        assert set(metric.figures) <= places[metric.kind], metric
    told = {(metric.kind, figure) for metric in metrics for figure in metric.figures}
    for name in GAUGES:
        assert (Kind.GAUGE, name) in told, name
    for name in counter_names():
        assert (Kind.COUNTER, name) in told or (Kind.GAUGE, name) in told, name
    assert {figure for kind, figure in told if kind is Kind.BUCKETS} == set(HISTOGRAMS)
    assert {figure for kind, figure in told if kind is Kind.OBSERVED} == set(SAMPLES)


def test_no_metric_is_there_twice_and_labels_are_of_fixed_sets():
    metrics = engine_metrics("m", 32, 48)
    keys = [(metric.family, frozenset(metric.labels.items())) for metric in metrics]
    assert len(set(keys)) == len(keys)
    kinds = {metric.family: metric.kind for metric in metrics}
    assert all(kinds[metric.family] is metric.kind for metric in metrics)
    assert len(keys) < 200
    assert all(len(list(words)) < 10 for words in COUNTERS.values())
