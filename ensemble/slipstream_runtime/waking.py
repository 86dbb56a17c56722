"""Who waits when a thread wakes up while another runs on its core.

By Linux's usual policy whoever wakes up may take the core at once. Where cores are few it is the
engine's that is taken, for every request that comes, is refused or sends a token, and all streams
wait for it. Under SCHED_BATCH a thread gets as much of a core as before, but does not interrupt.
So models' processes wake gently, and a tritonserver that we start; the engine does not. A thread
under a third policy was put there by somebody and stays; where the kernel or a sandbox refuses, all
goes on as usual.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)


def wake_gently() -> None:
    """Let no thread of this process, now or later, interrupt what runs when it wakes up."""
    with _refusal_told():
        _change_all(is_gentle=True)


def wake_at_once() -> None:
    """Undo `wake_gently` for this process, which may have inherited it."""
    with _refusal_told():
        _change_all(is_gentle=False)


@contextlib.contextmanager
def gentle_children() -> Iterator[None]:
    """What the calling thread starts within the block wakes gently, with all that it ever starts.

    Its starter changes instead of itself: between a fork and its exec nothing can fail or be told.
    """
    is_changed = False
    with _refusal_told():
        is_changed = _change(0, is_gentle=True)
    try:
        yield
    finally:
        if is_changed:
            with _refusal_told():
                _change(0, is_gentle=False)


@contextlib.contextmanager
def _refusal_told() -> Iterator[None]:
    try:
        yield
    except (OSError, AttributeError) as error:  # or the system has no such policy
        _log.debug("who waits on waking up is left as it is: %s", error)


def _change_all(is_gentle: bool) -> None:
    """Until there is no thread left that was begun meanwhile: it may have inherited the other."""
    seen: set[int] = set()
    while True:
        threads = {int(entry.name) for entry in Path("/proc/self/task").iterdir()} - seen
        if not threads:
            return
        for thread in threads:
            _change(thread, is_gentle)
        seen |= threads


def _change(thread: int, is_gentle: bool) -> bool:
    """Whether it was under the one policy and is now under the other; 0 is the calling thread."""
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
