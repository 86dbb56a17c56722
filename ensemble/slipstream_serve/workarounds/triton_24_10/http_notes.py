"""Room for what tritonserver's HTTP threads are told while they are busy.

A response over HTTP is noted in a socket of the thread that has its connection. Up to the newest
source (libevhtp's `evthr_defer`, which nobody looks at) a note that does not fit is lost, and the
response with it: as the kernel makes these sockets, note 279 of all streams while the thread parses
a long body. And the pool gives a connection to its first thread that has no notes: where little
happens that is always the same one. So whoever may reach into the server makes them larger.
"""

import ctypes
import errno
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ENOUGH = 5_000  # notes; half a second of 10,000 responses/s
_WANTED_BYTES = 32 << 20  # the kernel doubles it: 87,000 notes
_NOTE_BYTES = 768  # of the kernel's, for one of 17 bytes
_PIDFD_GETFD = 438  # on every architecture that Triton runs on
_SO_SNDBUFFORCE = 32
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SOCKET = re.compile(r"socket:\[\d+\]")


class _ClosedError(Exception):
    """The server has closed a descriptor meanwhile."""


def widen(pid: int) -> int:
    """Give the server's sockets as much room as it may have; how many notes the smallest takes.

    Beyond `net.core.wmem_max` that asks for CAP_NET_ADMIN. Raises OSError where this process may
    not reach into the server: it is another's, `ptrace_scope` or a container's profile forbids it,
    or the kernel is older than 5.6.
    """
    room = 0
    for end in _pairs(pid):
        with end:
            try:
                end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _WANTED_BYTES)
            except PermissionError:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WANTED_BYTES)
            notes = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // _NOTE_BYTES
            room = min(room or notes, notes)
    return room


def _pairs(pid: int) -> Iterator[socket.socket]:
    """Our own descriptors of all ends of socket pairs that the process made for itself."""
    pidfd = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError, _ClosedError):
                if _SOCKET.fullmatch(os.readlink(entry)):
                    found = socket.socket(fileno=_descriptor(pidfd, int(entry.name)))
                    if _is_own_pair(found, pid):
                        yield found
                    else:
                        found.close()
    finally:
        os.close(pidfd)


def _descriptor(pidfd: int, number: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    found: int = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if found < 0:
        code = ctypes.get_errno()
        if code == errno.EBADF:
            raise _ClosedError
        raise OSError(code, os.strerror(code))
    os.set_inheritable(found, False)
    return found


def _is_own_pair(end: socket.socket, pid: int) -> bool:
    if (end.family, end.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        return False
    given = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    maker: int = _CREDENTIALS.unpack(given)[0]
    return maker == pid and end.getsockname() == ""
