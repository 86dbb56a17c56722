"""Threads that share the work on one adapter, beside the one that runs steps."""

import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from slipstream_runtime.processes import num_cores

_MOST_THREADS = 8  # most of their time is digests, 2 GB/s each
_TURN_S = 5e-4  # of the interpreter's lock
_PAUSE_S = 5e-5
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Turns:
    """Gives away the interpreter's lock, if it was kept for half a millisecond.

    A thread that waits for it, to launch a step, gets it after 5 ms otherwise. What computes
    without the lock needs no turns.
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def __call__(self) -> None:
        """Sleep for a moment if it is time; the thread that waits is woken by then."""
        if time.perf_counter() - self._begin > _TURN_S:
            time.sleep(_PAUSE_S)
            self._begin = time.perf_counter()


def in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Generator[_Result, None, None]:
    """Yield what a function returns for each item, in order; some items ahead are worked on.

    A thread computes without others of torch: it would wake up as many as there are cores for each
    operation, beside those of the other threads.
    """
    count = max(1, min(_MOST_THREADS, num_cores() // 2))
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(count, "adapter-pieces", _compute_alone) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(torch.inference_mode()(function), item))
                if len(waiting) > 2 * count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()


def _compute_alone() -> None:
    """Have torch compute in this thread without others.

    `torch.set_num_threads` would do so in every thread that has not computed yet, too.
    """
    torch.get_num_threads()  # the thread takes the number of the process, once
    _openmp().omp_set_num_threads(1)


@functools.cache
def _openmp() -> ctypes.CDLL:
    """Return the library by which torch computes in threads, among those that its own one needs."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
