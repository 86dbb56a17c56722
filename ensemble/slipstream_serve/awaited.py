"""Notice a start that hangs: tritonserver waits for the end of a model's process, which lives.

A Triton 24.10 takes a model's process for dead if that gave no sign for a second, and then waits
for its end, which it does not bring about. A machine that stands still for a second or two while
models load (it is moved, or its memory is) makes it do so: the server is never ready then, and
neither ends nor writes anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream_runtime.processes import threads_of

LOOK_S = 0.5  # between two looks: a server has hundreds of threads
AWAITED_S = 5.0  # a process that is ending ends sooner
_WAIT4 = ("61", "260")  # its number on x86-64, and on aarch64


class AwaitedEnds:
    """Watches one server that starts. Call `look` as often as you like."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}  # by process whose end is awaited
        self._looked_s = 0.0

    def look(self, server_pid: int, stubs: Callable[[], Mapping[int, str]]) -> str:
        """Return what hangs; empty if nothing does, or a thread's call cannot be read.

        `stubs` gives the models' processes that live: pid to the instance's name.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return ""
        self._looked_s = now_s
        awaited = _awaited_by(server_pid)
        living = stubs() if awaited else {}
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in awaited if pid in living}
        for pid, since_s in self._since_s.items():
            if now_s - since_s > AWAITED_S:
                name = living[pid]
                return f"tritonserver waits for the end of {name} (pid {pid}), which does not end"
        return ""


def _awaited_by(server_pid: int) -> set[int]:
    """Return the processes for whose end some thread waits, each by itself."""
    found = set()
    for thread in threads_of(server_pid):
        call = Path(f"/proc/{server_pid}/task/{thread}/syscall")
        try:
            number, *arguments = call.read_text().split()
        except (OSError, ValueError):  # it has ended, or may not be read
            continue
        if number in _WAIT4 and arguments:
            found.add(int(arguments[0], 16))
    return found
