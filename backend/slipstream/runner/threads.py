"""The number of threads of a step on a CPU, measured at the first start of a model.

Steps of one row and of 16 are timed with all cores, half of them, and so on. A server's other
processes keep a core, unless a step is so long that their work beside it is nothing.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from slipstream_runtime.ranks import RankMemory

from slipstream.runner.host import MIN_ELEMENTS, Cores, Kept, cores_here, is_busy
from slipstream.runner.joining import make_runner
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import THREADS, Plan
from slipstream.runner.step_facts import facts_of_step
from slipstream.runner.step_shape import StepShape

_log = logging.getLogger(__name__)
_ROWS = (1, 16)
_BUDGET_S = 0.8  # after which no more is measured
_REPEAT = 4  # steps of which the shortest counts
_ONE_ROW_S = 0.04  # a step of one row beyond which those of more are not measured
_LONG_S = 0.02  # a step beside which a server's own work is nothing
_GAIN = 0.97  # of the time that more threads must save

Timer = Callable[[int, int], float]  # seconds of a step, by threads and rows


def start_runner(plan: Plan, memory: RankMemory | None) -> tuple[Plan, ModelRunner]:
    """`make_runner` for a server's engine; return the plan with the threads that were measured."""
    plan, runner = make_runner(plan, memory)
    return chosen(plan, runner), runner


def chosen(plan: Plan, runner: ModelRunner) -> Plan:
    """Set torch's threads for a server's engine, and say why; return the plan that has them."""
    is_open = plan.device.type == "cpu" and os.environ.get(THREADS) is None
    if not is_open or plan.config.num_ranks > 1 or plan.block_elements < MIN_ELEMENTS:
        return plan
    found = cores_here()
    if found.all == 1:
        return _set(plan, 1)
    kept = Kept("threads", facts_of_step(plan, plan.model))
    known = kept.read()
    count = None if known is None else known.get("threads")
    if isinstance(count, int) and 1 <= count <= found.all:
        _log.info("threads: %d of %d cores, as measured before (%s)", count, found.all, kept.path)
        return _set(plan, count)
    if is_busy(found.all):
        _log.info("threads: not measured, as others use the machine; later starts will")
        return plan
    times = measure(candidates(found), _timer(runner, found.all))
    count = best(times, found.all)
    said = ", ".join(
        f"{threads}: " + " and ".join(f"{1e3 * each:.1f}" for each in seconds)
        for threads, seconds in sorted(times.items())
    )
    where = kept.write({"threads": count, "seconds": {str(n): each for n, each in times.items()}})
    _log.info(
        "threads: %d of %d cores, measured: ms of a step of 1 and %d rows by threads: %s; %s",
        *(count, found.all, _ROWS[1], said, where),
    )
    return _set(plan, count)


def candidates(found: Cores) -> list[int]:
    """Return numbers of threads, the most first: all cores, all but one, a node's, and halves."""
    counts = {found.all, found.all - 1, found.of_node}
    half = found.all
    while half > 1:
        half //= 2
        counts.add(half)
    return sorted((count for count in counts if count >= 1), reverse=True)


def measure(counts: Iterable[int], timer: Timer) -> dict[int, tuple[float, ...]]:
    """Return the shortest steps of each number of threads, as many as the time allows.

    Of steps that take long only those of one row are measured.
    """
    left = _BUDGET_S
    times: dict[int, tuple[float, ...]] = {}
    for count in counts:
        found: list[float] = []
        for rows in _ROWS:
            seconds: list[float] = []
            for _ in range(_REPEAT):
                seconds.append(timer(count, rows))
                left -= seconds[-1]
                if left < 0:
                    break
            found.append(min(seconds))
            if left < 0 or found[0] > _ONE_ROW_S:
                break
        times[count] = tuple(found)
        if left < 0:
            break
    return times


def best(times: dict[int, tuple[float, ...]], all_cores: int) -> int:
    """Return the threads of the shortest steps; of nearly the same ones the fewest."""
    most = min(map(len, times.values()))

    def cost(count: int) -> float:
        product = 1.0
        for each in times[count][:most]:
            product *= each
        return float(product ** (1 / most))

    open_to = [n for n in times if n < all_cores or times[n][0] > _LONG_S] or list(times)
    least = min(map(cost, open_to))
    return min(count for count in open_to if cost(count) * _GAIN <= least)


def _timer(runner: ModelRunner, most: int) -> Timer:
    def timed(threads: int, rows: int) -> float:
        torch.set_num_threads(threads)
        step = runner.padding(StepShape(rows, rows, rows, rows, 1))
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    timed(most, 1)  # what a first step does once
    return timed


def _set(plan: Plan, count: int) -> Plan:
    torch.set_num_threads(count)
    return replace(plan, num_threads=count)
