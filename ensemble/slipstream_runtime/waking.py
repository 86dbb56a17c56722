"""Choose whether a waking thread interrupts the thread that runs on its core.

By Linux's default policy a waking thread may take the core at once. With few cores it takes the
engine's, for every request that arrives, is refused or sends a token, and all streams wait. Under
SCHED_BATCH a thread gets as much processor time as before, but does not interrupt. So models'
processes, and a tritonserver that we start, wake gently; the engine does not. A thread under a
third policy keeps it; if the kernel or a sandbox refuses the change, nothing changes.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)


def wake_gently() -> None:
    """Keep all threads of this process, now and later, from interrupting others as they wake."""
    with _refusals_logged():
        _change_all(is_gentle=True)


def wake_at_once() -> None:
    """Undo `wake_gently` for this process, which may have inherited it."""
    with _refusals_logged():
        _change_all(is_gentle=False)


@contextlib.contextmanager
def gentle_children() -> Iterator[None]:
    """Make what the calling thread starts within the block wake gently, with all descendants.

    The starting thread itself changes: between a fork and its exec nothing could report an error.
    """
    is_changed = False
    with _refusals_logged():
        is_changed = _change(0, is_gentle=True)
    try:
        yield
    finally:
        if is_changed:
            with _refusals_logged():
                _change(0, is_gentle=False)


@contextlib.contextmanager
def _refusals_logged() -> Iterator[None]:
    try:
        yield
    except (OSError, AttributeError) as error:  # or the system has no such policy
        _log.debug("the scheduling policy is left as it is: %s", error)


def _change_all(is_gentle: bool) -> None:
    """Change every thread, until no new one appears: it may have inherited the old policy."""
    seen: set[int] = set()
    while True:
        threads = {int(entry.name) for entry in Path("/proc/self/task").iterdir()} - seen
        if not threads:
            return
        for thread in threads:
            _change(thread, is_gentle)
        seen |= threads


def _change(thread: int, is_gentle: bool) -> bool:
    """Change a thread (0: the calling one); return whether it was under the other policy."""
    before, after = os.SCHED_OTHER, os.SCHED_BATCH
    if not is_gentle:
        before, after = after, before
    try:
        if os.sched_getscheduler(thread) != before:
            return False
        os.sched_setscheduler(thread, after, os.sched_param(0))
    except ProcessLookupError:  # it has ended meanwhile
        return False
    return True
