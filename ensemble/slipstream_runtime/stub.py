"""What every model's process does so that its responses cost less, and it never stalls."""

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

_NUM_NEW = 20_000  # objects made and not freed again, after which new ones are looked at
_SWITCH_S = 0.0005
_ANSWER_S = 60.0
_LENGTH = struct.Struct("<I")
_LAST_STANDARD = 2  # file descriptor: a log may be a socket
_PROBE = np.array([b"", b"some\0bytes"], dtype=object)

Serialize = Callable[[np.ndarray], Any]


def rest_collector() -> None:
    """Let Python's garbage collector look at nothing that is there by now, and seldom at the rest.

    Call it when all that stays has been loaded. With a tokenizer's tables to go through, a
    collection takes 50 ms and more, in which no stream gets a token; and tokens that wait to be
    sent, hundreds at a time, bring it about every few seconds. Garbage in cycles, which ended
    requests leave, is a few MB before it is found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW, 10, 10)


def close_inherited() -> None:
    """Close the connections, and pairs of sockets, that a tritonserver at work leaves to its child.

    Call it before this process opens one of its own. A client whose connection the server has ended
    would not hear of it as long as this process lives.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists them
            if fd > _LAST_STANDARD and stat.S_ISSOCK(os.fstat(fd).st_mode):
                _close_if_inherited(socket.socket(fileno=fd))


def _close_if_inherited(found: socket.socket) -> None:
    """What has a name or a peer on this machine may be a library's, of this process."""
    try:
        is_pair = found.family == socket.AF_UNIX and not found.getsockname() + found.getpeername()
        is_inherited = is_pair or found.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # it listens
        is_inherited = False
    (found.close if is_inherited else found.detach)()


def share_interpreter() -> None:
    """Let each thread wait for the interpreter for half a millisecond only; Python's own is 5.

    A thread that always finds work gives it up for no longer than it takes another to wake up, so
    the others get it by force, one after the other: with several that send, tokens waited for tens
    of ms, and those of some streams for hundreds.
    """
    sys.setswitchinterval(_SWITCH_S)


@contextlib.contextmanager
def must_end(within_s: float = _ANSWER_S) -> Iterator[None]:
    """Around what tells the server a metric: this process ends if it takes longer.

    Triton's stub holds the interpreter while it waits for the server's answer. Of a server that has
    died none comes, and the process would stay for good: no thread of it can run any more. One that
    is stopped for so long costs its models' processes too; they are seen and repaired as dead ones.
    """
    faulthandler.dump_traceback_later(within_s, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def quicken_bytes(utilities: Any) -> None:
    """Replace the function by which Triton's Python backend writes a tensor of bytes.

    `utilities` is its module `triton_python_backend_utils`. Its own takes 4 us for one element, a
    tenth of a response. A version that writes otherwise than 24.10 keeps its own.
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
    """Each with its length before it."""
    if len(items) == 1:
        [only] = items
        return _LENGTH.pack(len(only)) + only
    return b"".join([part for item in items for part in (_LENGTH.pack(len(item)), item)])
