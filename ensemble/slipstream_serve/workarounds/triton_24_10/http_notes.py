"""Enlarge the buffers of responses that wait for a busy HTTP thread of tritonserver.

Each response over HTTP is noted in a socket of the thread that has its connection. Up to the newest
source (libevhtp's `evthr_defer`, whose result is ignored) a note that does not fit is lost, and the
response with it: with the kernel's default size, note 279 of all streams while the thread parses a
long body. And the pool gives a new connection to its first thread without notes: while little
happens, always the same one. So a process that may access the server enlarges the sockets.
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

ENOUGH = 5_000  # notes: half a second at 10,000 responses/s
_WANTED_BYTES = 32 << 20  # the kernel doubles it: 87,000 notes
_NOTE_BYTES = 768  # what the kernel needs for a note of 17 bytes
_PIDFD_GETFD = 438  # on every architecture that Triton runs on
_SO_SNDBUFFORCE = 32
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SOCKET = re.compile(r"socket:\[\d+\]")


class _ClosedError(Exception):
    """The server has closed a descriptor meanwhile."""


def widen(pid: int) -> int:
    """Enlarge the server's sockets as far as allowed; return how many notes the smallest takes.

    Beyond `net.core.wmem_max` this needs CAP_NET_ADMIN. Raises OSError if this process may not
    access the server: it belongs to another user, `ptrace_scope` or a container's profile forbids
    it, or the kernel is older than 5.6.
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
    """Yield duplicates of all ends of socket pairs that the process made for itself."""
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
