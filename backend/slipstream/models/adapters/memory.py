"""Host memory that is read into, used again by what is read next.

A process pays for memory when it first writes to it: the kernel fills pages with zeros, and a
virtual machine may have to ask its host for them, which took longer than all else of a load. Memory
that was given back to the system is paid for again.
"""

import itertools
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STEP = 1 << 20  # bytes: sizes are multiples, so that one room serves many
_MOST_KEPT = 192 << 20  # bytes that nobody has: an adapter of an 8B as it is read, and laid out
_Bytes = NDArray[np.uint8]


class Memory:
    """Rooms of host memory; one is free again when no tensor has a part of it."""

    def __init__(self, most_kept: int = _MOST_KEPT) -> None:
        """Keep at most so many bytes that are free."""
        self._most_kept = most_kept
        self._free: dict[int, _Bytes] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # a room may become free in a thread that takes one

    def take(self, size: int) -> Tensor:
        """Return `[size]` u8, of any values. Less than a megabyte is new each time."""
        if size < _STEP:
            return torch.from_numpy(np.empty(size, np.uint8))
        whole = self._found(size)
        if whole is None:
            whole = np.empty(-(-size // _STEP) * _STEP, np.uint8)
        part = whole[:size]  # which the tensor keeps, and nothing else does
        weakref.finalize(part, self._give_back, whole).atexit = False
        return torch.from_numpy(part)

    @property
    def num_kept(self) -> int:
        """Bytes that are free."""
        with self._lock:
            return sum(each.nbytes for each in self._free.values())

    def _found(self, size: int) -> _Bytes | None:
        """Take the smallest room that is free, of at most twice the size."""
        with self._lock:
            fits = [(x.nbytes, n) for n, x in self._free.items() if size <= x.nbytes <= 2 * size]
            return self._free.pop(min(fits)[1]) if fits else None

    def _give_back(self, whole: _Bytes) -> None:
        with self._lock:
            if self.num_kept + whole.nbytes <= self._most_kept:
                self._free[next(self._numbers)] = whole


MEMORY = Memory()  # of all that this process reads
