"""Set up a model's process so that its responses cost less and never stall."""

import contextlib
import faulthandler
import gc
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_NUM_NEW = 20_000  # net new objects between two collections of the youngest generation
_SWITCH_S = 0.0005
_ANSWER_S = 60.0
_LENGTH = struct.Struct("<I")
_LAST_STANDARD = 2  # file descriptor: a log may be a socket
_PROBE = np.array([b"", b"some\0bytes"], dtype=object)

Serialize = Callable[[np.ndarray], Any]


def rest_collector() -> None:
    """Exempt all present objects from garbage collection, and collect the others rarely.

    Call it once everything long-lived is loaded. A collection that walks a tokenizer's tables
    takes 50 ms and more, in which no stream gets a token, and hundreds of tokens waiting to be
    sent trigger one every few seconds. The cost: reference cycles of ended requests grow to a few
    MB before they are found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW, 10, 10)


def close_inherited() -> None:
    """Close the network connections and socket pairs inherited from a running tritonserver.

    Call it before this process opens any of its own. An inherited connection stays open while this
    process lives, so a client would never see that the server has closed it.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if fd > _LAST_STANDARD and stat.S_ISSOCK(os.fstat(fd).st_mode):
                _close_if_inherited(socket.socket(fileno=fd))


def _close_if_inherited(found: socket.socket) -> None:
    """Close a socket unless it has a name or peer on this machine: it may belong to a library."""
    try:
        is_pair = found.family == socket.AF_UNIX and not found.getsockname() + found.getpeername()
        is_inherited = is_pair or found.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # a listening socket has no peer
        is_inherited = False
    (found.close if is_inherited else found.detach)()


def share_interpreter() -> None:
    """Set the longest wait for the interpreter to 0.5 ms; Python's default is 5 ms.

    A busy thread that releases the interpreter takes it back before another has woken up, so the
    others wait the whole interval, one after another. With several sending threads, tokens waited
    for tens of ms, and those of some streams for hundreds.
    """
    sys.setswitchinterval(_SWITCH_S)


@contextlib.contextmanager
def must_end(within_s: float = _ANSWER_S) -> Iterator[None]:
    """End this process if the block, which reports a metric to the server, takes longer.

    Triton's stub keeps the interpreter while it waits for the server's reply. If the server has
    died, no reply comes, and no thread of this process can run any more. A server that is stopped
    (SIGSTOP) for that long loses its models' processes as well; they are repaired as dead ones.
    """
    faulthandler.dump_traceback_later(within_s, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def quicken_bytes(utilities: Any) -> None:
    """Replace the function by which Triton's Python backend serialises a tensor of bytes.

    `utilities` is the module `triton_python_backend_utils`. Its function takes 4 us for one
    element, a tenth of a response. A version whose output differs from 24.10's keeps its own.
    """
    theirs = getattr(utilities, "serialize_byte_tensor", None)
    if theirs is None:
        return
    written = theirs(_PROBE)
    if type(written) is bytes and written == _serialize(_PROBE.tolist()):
        utilities.serialize_byte_tensor = _quicker(theirs)


def _quicker(theirs: Serialize) -> Serialize:
    def serialize(array: np.ndarray) -> Any:
        if array.dtype == object and array.size:
            items = array.ravel().tolist()
            if all(type(item) is bytes for item in items):
                return _serialize(items)
        return theirs(array)

    return serialize


def _serialize(items: list[bytes]) -> bytes:
    """Serialise items, each with its length (uint32) before it."""
    if len(items) == 1:
        [only] = items
        return _LENGTH.pack(len(only)) + only
    return b"".join([part for item in items for part in (_LENGTH.pack(len(item)), item)])
