"""Launches noted as they are made, to be made again with other addresses.

Noted are those of one thread, in their order: kernels of `jit.launch` and GEMMs of cuBLASLt, but no
kernels of other libraries, torch's among them. `lasting` is the memory that launches share wherever
they are made: it is never freed, and each leaves it as it was.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.kernels.runtime.kernel import TensorMap


@dataclass(slots=True)
class Noted:
    """A launch in the stream in which it was made."""

    name: str  # of the kernel or the GEMM
    again: Callable[[list[Any], dict[int, TensorMap]], int | None]  # with other values: a status
    values: list[Any]
    addresses_at: list[int]  # values that are addresses of tensors
    maps: dict[int, TensorMap]  # in the place of values


_notes: list[Noted] | None = None
_thread = 0
_turn = threading.Lock()  # to note
_lasting: dict[int, Tensor] = {}  # by address


@contextmanager
def noting() -> Iterator[list[Noted]]:
    """Note the launches of this block; none where another, of any thread, notes already."""
    global _notes, _thread
    if not _turn.acquire(blocking=False):
        yield []
        return
    _thread = threading.get_ident()  # before there are notes, which another thread may look at
    _notes = []
    try:
        yield _notes
    finally:
        _notes = None
        _turn.release()


def is_noting() -> bool:
    """Whether launches of this thread are noted."""
    return _notes is not None and _thread == threading.get_ident()


def note(launch: Noted) -> None:
    """Note a launch that was made; launches are noted."""
    assert _notes is not None, "`is_noting` is asked first"
    _notes.append(launch)


def lasts(tensor: Tensor) -> Tensor:
    """Keep a tensor that all launches share, and return it."""
    return _lasting.setdefault(tensor.data_ptr(), tensor)


def lasting() -> list[Tensor]:
    """Return what all launches share."""
    return [*_lasting.values()]


def lasting_at(address: int) -> int:
    """Return the address if memory that lasts begins there, else 0."""
    return address if address in _lasting else 0
