"""Kubernetes' autoscaler as published, and the chart's rule: in time, and without flapping."""

import importlib
import math
from itertools import pairwise

import pytest
import yaml

NAMES = (
    *("shapes", "workloads", "limits", "step_times", "traces", "recorded_load", "replicas"),
    "autoscaling",
)
pytestmark = pytest.mark.usefixtures("bench")


def module():
    return importlib.import_module("autoscaling")


@pytest.mark.parametrize(
    ("value", "target", "ready", "unready", "replicas"),
    [
        (8, 4, 1, 0, 2),
        (9, 4, 1, 0, 3),
        (4.3, 4, 1, 0, 1),  # within a tenth
        (4.5, 4, 1, 0, 2),
        (0, 4, 3, 0, 0),  # the minimum is another's
        (20, 4, 4, 0, 5),
        (14.6, 4, 4, 0, 4),
        (12, 4, 2, 1, 3),  # the one that starts is enough
        (20, 4, 2, 1, 5),
        (9, 4, 2, 1, 3),  # without it more, with it fewer: nothing
        (2, 4, 2, 1, 1),
        (50, 4, 0, 2, 2),  # nothing is known
    ],
)
def test_what_one_metric_wants(value, target, ready, unready, replicas):
    assert module().wanted(value, target, ready, unready) == replicas


def test_policies_bound_a_change_and_a_window_delays_it():
    a = module()
    rule = a.Rule({"waiting": 1.0}, 1, 20, 0.0, 60.0, (2, 100, 60.0), (1, 120.0))
    scaler, count, counts = a.Autoscaler(rule), 1, []
    for sync in range(40):
        now_s = 15.0 * sync
        load = 100.0 if now_s < 180 else 0.0
        count = scaler.decide(now_s, {"waiting": load}, count, 0)
        counts.append(count)
    assert counts[:13:4] == [3, 6, 12, 12]  # two more, then doubled each minute; then it falls
    assert counts[8] == 12
    ups = counts.index(20) if 20 in counts else 8
    assert ups >= 8
    falls = [15.0 * at for at in range(1, 40) if counts[at] < counts[at - 1]]
    assert falls[0] >= 180 + 60 - 15
    assert all(later - sooner >= 120 for sooner, later in pairwise(falls))


def test_the_chart_says_what_is_simulated():
    a = module()
    values = yaml.safe_load(a.VALUES.read_text())
    rule = a.rule_of(values)
    assert rule.targets == {"waiting": 4.0, "running": 40.0, "kv": 0.7}
    assert (rule.minimum, rule.up_window, rule.down_window) == (1, 30.0, 600.0)
    assert a.number("1500m") == 1.5


@pytest.mark.rest
def test_the_chart_scales_in_time_and_does_not_flap():
    """A replica serves some 31 requests a second; a pod takes a minute to start."""
    a = module()
    rule = a.rule_of(yaml.safe_load(a.VALUES.read_text()))

    def run(load, seconds, first, rule=rule):
        return a.simulate(rule, a.arrivals(load, seconds, 1), seconds, 60.0, first)

    steady = run(a.steady(50.0), 600, 2)
    assert steady.turns() == 0
    assert len(steady.changes) <= 1
    assert steady.percentile(99) < 1000
    ramp = run(a.ramp(20.0, 70.0, 60.0, 360.0), 540, 1)
    assert ramp.turns() == 0
    assert ramp.counts[-1][1] >= 3
    assert ramp.percentile(90) < 1000
    assert ramp.percentile(99, since_s=420) < 1000
    assert math.isfinite(ramp.mean_replicas())
    requests, seconds = a.recorded(importlib.import_module("recorded_load").CHATS, 6)
    hour = a.simulate(rule, requests, seconds, 60.0, 2)
    assert hour.turns() <= 5  # 15 with a window of a minute, and first tokens of 1.6 s
    assert hour.percentile(99) < 1000
    assert hour.mean_replicas() < 3.5
    queue = a.Rule({"waiting": 4.0}, down_window=60.0, down=(1, 60.0))
    assert run(a.steady(50.0), 600, 2, queue).turns() > 1  # what the other metrics are there for


def test_a_recorded_load_is_read_laid_over_itself_and_made_faster(tmp_path):
    r = importlib.import_module("recorded_load")
    hour = r.read()
    assert (len(hour), hour[0].due_s) == (19_366, 0.0)
    assert (hour[0].num_input, hour[0].num_output) == (374, 44)
    assert 3500 < hour[-1].due_s < 3600
    path = tmp_path / "published.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    lines = ["2023-11-16 18:15:50.9951690,396,109", "2023-11-16 18:15:46.6805900,374,0"]
    path.write_text("\n".join([head, *lines]))
    one, two = r.read(path)
    assert (one.due_s, one.num_input, one.num_output) == (0.0, 374, 1)
    assert two.due_s == pytest.approx(4.3146, abs=1e-3)
    thrice = r.overlaid(hour[:100], 3)
    assert len(thrice) == 300
    assert all(a.due_s <= b.due_s for a, b in pairwise(thrice))
    for rate, seconds in ((1.0, 300.0), (40.0, 60.0)):  # slower; and the hour more than once
        found = r.at_rate(hour[:500], rate, seconds)
        assert len(found) == pytest.approx(rate * seconds, rel=0.1)
        assert all(a.due_s <= b.due_s < seconds for a, b in pairwise(found))
    for text in (head, f"{head}\n2023-11-16,x,1", f"{head}\n2023-11-16,1", "a,b\n1,2"):
        path.write_text(text)
        with pytest.raises(ValueError, match=str(path)):
            r.read(path)
