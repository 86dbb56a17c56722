"""Threads that share the work on one adapter."""

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from slipstream_runtime.processes import num_cores

_MOST_THREADS = 8  # most of their time is digests, 1.2 GB/s each
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
