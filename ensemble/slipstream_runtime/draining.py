"""Drain a server: it refuses new requests from a moment on, and finishes those in flight.

A file of the runtime directory holds that moment, so every process that accepts requests reads it
before each. From the file's first moment on the server reports itself unhealthy, which lets load
balancers turn away before a request is refused. Probes are never refused: repairs go on.
"""

import contextlib
import os
import struct
import time
from collections.abc import Callable

from slipstream_runtime import inflight
from slipstream_runtime.directory import Runtime
from slipstream_runtime.processes import is_running
from slipstream_runtime.vitals import pid_of

DRAINING = "the server is draining"
_MOMENT = struct.Struct("<q")  # time.monotonic_ns()
_LOOK_S = 0.05
_SETTLE_S = 0.3  # from one step of an ensemble to the next, and until the last response is written


def start(runtime: Runtime, delay_s: float) -> None:
    """Have the server refuse new requests in `delay_s`. Raises OSError."""
    moment_ns = time.monotonic_ns() + round(delay_s * 1e9)
    new = runtime.draining.with_suffix(".new")
    new.write_bytes(_MOMENT.pack(moment_ns))
    os.replace(new, runtime.draining)  # a reader sees a whole file or none


def undo(runtime: Runtime) -> None:
    """Have the server accept requests again."""
    runtime.draining.unlink(missing_ok=True)


def has_started(runtime: Runtime) -> bool:
    """Return whether the server drains, or is about to."""
    return runtime.draining.exists()


def refuses(runtime: Runtime) -> bool:
    """Return whether new requests are refused now."""
    try:
        data = runtime.draining.read_bytes()
    except OSError:
        return False
    return len(data) == _MOMENT.size and time.monotonic_ns() >= _MOMENT.unpack(data)[0]


def num_in_flight(runtime: Runtime) -> int:
    """Count clients' requests in flight in the server's living processes, the gateway's, too."""
    files = runtime.directory.glob("in-flight-*")
    return sum(inflight.count_clients(file) for file in files if is_running(pid_of(file)))


def wait_idle(runtime: Runtime, deadline_s: float, watch: Callable[[int], None]) -> int:
    """Wait until no request is in flight, or until `deadline_s` (`time.monotonic()`).

    `watch` gets each count. Returns how many requests are left. A server that ends meanwhile
    leaves none.
    """
    idle_s: float | None = None  # since when
    while runtime.directory.exists():
        number, now_s = num_in_flight(runtime), time.monotonic()
        watch(number)
        idle_s = None if number else (now_s if idle_s is None else idle_s)
        if idle_s is not None and now_s - idle_s >= _SETTLE_S:
            return 0
        if now_s >= deadline_s:
            return number
        time.sleep(max(0.0, min(_LOOK_S, deadline_s - now_s)))
    return 0


def drain(runtime: Runtime, delay_s: float, timeout_s: float, watch: Callable[[int], None]) -> int:
    """Drain: accept for `delay_s` more, then refuse, and wait for `timeout_s` in all at most.

    Returns how many requests are left; the server goes on to refuse. Raises OSError.
    """
    begin_s = time.monotonic()
    start(runtime, delay_s)
    with contextlib.suppress(FileNotFoundError):  # the server has ended
        while time.monotonic() < begin_s + delay_s and runtime.draining.stat():
            time.sleep(_LOOK_S)
    return wait_idle(runtime, begin_s + timeout_s, watch)
