"""Threads that share the work on one adapter, beside the one that runs steps."""

import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import torch
from slipstream_runtime.processes import num_cores

_MOST_THREADS = 16  # most of their time is digests, 2 GB/s each
_TURN_S = 5e-4  # of the interpreter's lock
_PAUSE_S = 5e-5
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Turn(threading.local):
    """Since when a thread has kept the interpreter's lock, as far as it says so."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()


_turn = _Turn()


def turn() -> None:
    """Give away the interpreter's lock, if this thread kept it for half a millisecond: to be called
    in loops over tensors and modules.

    A thread that waits for it, to launch a step, gets it after 5 ms otherwise; it is woken in the
    moment that this one sleeps. What computes without the lock needs no turns.
    """
    if time.perf_counter() - _turn.begin > _TURN_S:
        time.sleep(_PAUSE_S)
        _turn.begin = time.perf_counter()


def start_turn() -> None:
    """Count from now on, as this thread has just waited for the lock."""
    _turn.begin = time.perf_counter()


def in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Generator[_Result, None, None]:
    """Yield what a function returns for each item, in order; some items ahead are worked on. The
    caller works on an item that is alone.

    A thread computes without others of torch: it would wake up as many as there are cores for each
    operation, beside those of the other threads.
    """

    @torch.inference_mode()
    def compute(item: _Item) -> _Result:
        start_turn()
        return function(item)

    left = iter(items)
    first = list(islice(left, 2))
    if len(first) == 1:
        with _computing_alone():
            found = compute(first[0])
        yield found
        return
    count = max(1, min(_MOST_THREADS, num_cores() // 2))
    pool, waiting = _pool(count), deque[Future[_Result]]()
    try:
        for item in chain(first, left):
            waiting.append(pool.submit(compute, item))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for each in waiting:
            each.cancel()
        wait(waiting)


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Return the threads, which stay: all loads of a process share them."""
    return ThreadPoolExecutor(count, "adapter-pieces", _compute_alone)


@contextmanager
def _computing_alone() -> Iterator[None]:
    """Have torch compute in this thread without others, in what runs inside."""
    torch.get_num_threads()  # as below
    before = _openmp().omp_get_max_threads()
    _openmp().omp_set_num_threads(1)
    try:
        yield
    finally:
        _openmp().omp_set_num_threads(before)


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
