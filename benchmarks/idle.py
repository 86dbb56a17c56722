"""How long the GPU has nothing to do in steady decode: `python benchmarks/idle.py [ROWS ...]`.

The wall time of a step of the engine, over many steps, less the time of the same graph replayed
back to back. Prints both, their difference as a share, and where the host's time goes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import workloads
from engine import build
from slipstream import wire
from slipstream.engine.engine import Engine
from slipstream.runner.step_shape import StepShape
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

NUM_STEPS, NUM_REPLAYS = 60, 20


class Clock:
    """Sums up the time inside some calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, name: str) -> None:
        """Replace a method by one that is timed."""
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = plain(*args)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return result

        setattr(owner, name, timed)


def steps(engine: Engine) -> float:
    """Seconds of a step, over `NUM_STEPS`."""
    engine.step()
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    return (time.perf_counter() - begin) / NUM_STEPS


def replays(engine: Engine, rows: int) -> float:
    """Seconds of the graph of the last step, its inputs as they are."""
    graphs = engine._runner._graphs  # type: ignore[attr-defined]
    padded = graphs.shape_of(StepShape(rows, rows, rows, rows, 0))
    assert padded is not None
    graph = graphs.graph(padded).graph
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[-1]) / NUM_REPLAYS / 1e3


def measure(engine: Engine, rows: int) -> None:
    """One line for a number of rows that decode."""
    workload = workloads.decode(rows, max_tokens=5 * NUM_STEPS)
    sampling = SamplingParams(max_tokens=workload.max_tokens, temperature=0.0)
    for number, prompt in enumerate(workload.prompts):
        engine.submit(b"bench", wire.Submit(number, pack(prompt), sampling, time.monotonic_ns()))
    scheduler = engine._scheduler
    while scheduler.num_waiting or any(s.num_outputs < 2 for s in scheduler.running.values()):
        engine.step()
    walls, graphs = [], []
    steps(engine)
    for _ in range(3):  # the graph's time grows with the sequences: it is taken between
        before = steps(engine)
        graphs.append(replays(engine, rows))
        walls.append(before)
    wall, graph = statistics.mean(walls), statistics.mean(graphs)
    clock = Clock()
    clock.watch(scheduler, "schedule")
    clock.watch(engine._runner, "launch")
    clock.watch(scheduler, "commit")
    clock.watch(engine, "_outputs")
    for _ in range(20):
        engine.step()
    parts = ", ".join(f"{name} {seconds / 20 * 1e6:.0f}" for name, seconds in clock.seconds.items())
    print(
        f"{rows:4} rows: step {wall * 1e3:.3f} ms, graph {graph * 1e3:.3f} ms, idle "
        f"{1 - graph / wall:.2%}; host us: {parts}",
        flush=True,
    )
    for owner, names in ((scheduler, ("schedule", "commit")), (engine, ("_outputs",))):
        for name in names:
            delattr(owner, name)
    delattr(engine._runner, "launch")
    engine.cancel_bridge(b"bench")
    while engine.has_work:
        engine.step()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[1, 256])
    parser.add_argument("--shape", default="llama-3.1-8b")
    args = parser.parse_args()
    engine = build(args.shape, "auto", 2048)
    for rows in args.rows:
        measure(engine, rows)


if __name__ == "__main__":
    sys.exit(main())
