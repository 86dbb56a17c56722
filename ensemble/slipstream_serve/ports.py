"""Find free ports for servers of tests and benchmarks; none is given out twice meanwhile.

A port that the kernel gives to a probe is anybody's again once the probe is closed: another
server's, or that of a connection to somewhere. So ports come from below those that the kernel gives
out, and a process claims each, until it ends, against others that look here too.
"""

import functools
import os
import random
import socket
import tempfile
from pathlib import Path

from slipstream_runtime.claims import Claims

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SPAN = 16_384  # ports below those of the kernel's
_LEAST = 1024
_given: set[int] = set()  # to this process


def free_ports(count: int) -> list[int]:
    """Return so many ports of this machine. Raises OSError if there are too few."""
    end = max(_LEAST, int(_RANGE.read_text().split()[0]))
    ports = list(range(max(_LEAST, end - _SPAN), end))
    random.shuffle(ports)
    found: list[int] = []
    while len(found) < count:
        if not ports:
            raise OSError(f"fewer than {count} free ports below {end}")
        if _take(port := ports.pop()):
            found.append(port)
    return found


def _take(port: int) -> bool:
    """Claim a port, if it is nobody's; return whether it is ours."""
    if port in _given or not _claims().take(str(port)):
        return False
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            _claims().release(str(port))
            return False
    _given.add(port)
    return True


@functools.cache
def _claims() -> Claims:
    """Return the claims of this process, which end with it."""
    return Claims(Path(tempfile.gettempdir()) / f"slipstream-ports-{os.getuid()}")
