"""Sum up what engines have counted since this process started to ask, across restarts."""

from collections import defaultdict

from slipstream import wire

Values = dict[str, float]


class Totals:
    """Sums over all engines, one after the other: they never fall when an engine is replaced."""

    def __init__(self) -> None:
        self.values: Values = defaultdict(float)
        self._engine: tuple[int, float] | None = None
        self._before: Values = {}

    def advance(self, status: wire.Status) -> None:
        """Add what is new. Counts of the first engine from before belong to an earlier process."""
        assert status.figures is not None
        engine, now = (status.engine_pid, status.figures.gauges["start_time_s"]), _flat(status)
        if self._engine is None:
            self._before = now
        elif engine != self._engine:
            self._before = {}
            self.values["engine_restarts"] += 1
        self._engine = engine
        for name, value in now.items():
            self.values[name] += max(0.0, value - self._before.get(name, 0.0))
        self._before = now


def _flat(status: wire.Status) -> Values:
    """Return counters, those of replicas too, and cells of histograms (`name#0` ...) by name."""
    assert status.figures is not None
    values = dict(status.figures.counters)
    for each in status.replicas:
        values[f"replica:{each.number}:requests_total"] = each.num_requests
        values[f"replica:{each.number}:restarts_total"] = each.num_restarts
    for name, (counts, total) in status.figures.histograms.items():
        values |= {f"{name}#{number}": count for number, count in enumerate(counts)}
        values[f"{name}#sum"] = total
    return values
