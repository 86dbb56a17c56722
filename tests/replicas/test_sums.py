"""Counters of replicas add up to what was counted, whichever process restarts."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from slipstream import wire
from slipstream.bridge.totals import Totals
from slipstream.replicas.sums import ReplicaTotals, sum_figures


class Engine:
    """The counts of a process."""

    def __init__(self, pid: int, start_s: float) -> None:
        self.pid, self.start_s = pid, start_s
        self.steps, self.cells, self.is_up = 0, [0, 0], True

    def status(self) -> wire.Status:
        histograms = {"queue_s": (list(self.cells), 0.5 * sum(self.cells))}
        figures = wire.Figures(
            {"start_time_s": self.start_s, "running": float(self.pid), "block_size": 16.0},
            *({"steps": float(self.steps)}, histograms, {}),
        )
        return wire.Status(0, "m", self.pid, 1, 1, 0, 0, 0.0, 0, 0, [], figures=figures)


class World:
    """Engines, a router, and a bridge that adds up what the router says."""

    def __init__(self) -> None:
        self.now_s, self.pid = 0.0, 0
        self.bridge = Totals()
        self.engines: list[Engine] = []
        self.counted, self.sent = 0, 0
        self.start_router()
        self.engines = [self._new(), self._new()]
        self.look()

    def _new(self) -> Engine:
        self.now_s, self.pid = self.now_s + 1, self.pid + 1
        return Engine(self.pid, self.now_s)

    def start_router(self) -> None:
        """A router waits for one engine at least."""
        if self.engines and not any(engine.is_up for engine in self.engines):
            self.engines[0] = self._new()
        router = self._new()
        self.router, self.num_sent, self.num_restarts = router, [0, 0], [0, 0]
        self.totals = [ReplicaTotals(lambda pid: pid < router.pid) for _ in range(2)]
        self.look(has_bridge=False)

    def restart(self, which: int) -> None:
        self.engines[which] = self._new()
        self.num_restarts[which] += 1

    def end(self, which: int) -> None:
        self.engines[which].is_up = False

    def count(self, which: int, num: int) -> None:
        engine = self.engines[which]
        if not engine.is_up:
            return
        engine.steps += num
        engine.cells[num % 2] += num
        self.num_sent[which] += 1
        self.counted, self.sent = self.counted + num, self.sent + 1

    def look(self, has_bridge: bool = True) -> None:
        for totals, engine in zip(self.totals, self.engines, strict=False):
            if engine.is_up:
                totals.take(engine.status())
        found = [
            totals.known(engine.pid if engine.is_up else 0)
            for totals, engine in zip(self.totals, self.engines, strict=False)
        ]
        known = [each for each in found if each is not None]
        if not has_bridge or not known:
            return
        figures = self.figures = sum_figures(known)
        figures.gauges["start_time_s"] = self.router.start_s
        states = [
            wire.ReplicaState(
                number, 1, True, num_requests=sent, num_restarts=self.num_restarts[number]
            )
            for number, sent in enumerate(self.num_sent)
        ]
        self.bridge.advance(
            wire.Status(
                *(0, "m", self.router.pid, 1, 1, 0, 0, 0.0, 0, 0, []),
                figures=figures,
                replicas=states,
            )
        )


STEPS: dict[str, Callable[[World, int, int], None]] = {
    "count": lambda world, which, num: world.count(which, num),
    "restart an engine": lambda world, which, num: world.restart(which),
    "end an engine": lambda world, which, num: world.end(which),
    "restart the router": lambda world, which, num: world.start_router(),
    "look": lambda world, which, num: None,
}


@given(st.lists(st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 1), st.integers(1, 9))))
def test_counters_add_up(steps: list[tuple[str, int, int]]) -> None:
    """A bridge looks before each restart: what is counted behind its last look is lost."""
    world = World()
    num_restarts = 0
    for what, which, num in steps:
        STEPS[what](world, which, num)
        num_restarts += what == "restart an engine"
        world.look()
        up = [float(engine.pid) for engine in world.engines if engine.is_up]
        assert world.figures.gauges.get("running", 0.0) == sum(up)
        assert world.figures.gauges["block_size"] == 16.0
        values = world.bridge.values
        assert values["steps"] == values["queue_s#0"] + values["queue_s#1"] == world.counted
        assert values["queue_s#sum"] == 0.5 * world.counted
        assert values["replica:0:requests_total"] + values["replica:1:requests_total"] == world.sent
        restarts = [values[f"replica:{number}:restarts_total"] for number in range(2)]
        assert sum(restarts) == num_restarts
