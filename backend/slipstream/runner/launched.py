"""A step between its launch and its results."""

from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns

import torch

from slipstream.core.batch import Sampled
from slipstream.runner.masks import StepMasks


class StepEnds:
    """Say how long ago a step ended when the host looks.

    The host may look late: while a step with prompts is launched, kernel by kernel, the one before
    it ends. Then its end is the last known one and what the device's clock says between the two, so
    it is never put before the true end. Wherever the host waited, it knows the end itself, which
    keeps the two clocks together.

    Args:
        events: with times, one more than steps are in flight, so that the last end is kept.
        clock: time in ns.
    """

    def __init__(
        self, events: list[torch.cuda.Event], clock: Callable[[], int] = monotonic_ns
    ) -> None:
        self._events = events
        self._clock = clock
        self._num_recorded = 0
        self._last = -1, 0  # number and end in ns of the step that was seen last

    def record(self) -> int:
        """Note the end of what has been launched, and return its number."""
        number = self._num_recorded
        self._events[number % len(self._events)].record()
        self._num_recorded += 1
        return number

    def wait(self, number: int) -> int:
        """Block until a step has ended, and return how long ago that was, in ns."""
        event = self._events[number % len(self._events)]
        has_ended = event.query()  # type: ignore[no-untyped-call]
        event.synchronize()
        now_ns = end_ns = self._clock()
        before, before_ns = self._last
        if has_ended and before == number - 1 >= 0:
            took_ms = self._events[before % len(self._events)].elapsed_time(event)
            end_ns = min(now_ns, before_ns + int(1e6 * took_ms))
        self._last = number, end_ns
        return now_ns - end_ns


class LaunchedStep:
    """A step on its way.

    Args:
        read: returns its results; without a device it computes them.
        masks: of its rows, if any has one.
        wait: blocks until the device has ended it, and returns how long ago that was, in ns.
    """

    def __init__(
        self,
        read: Callable[[], Sampled],
        masks: StepMasks | None = None,
        wait: Callable[[], int] | None = None,
    ) -> None:
        self._read = read
        self._masks = masks
        self._wait = wait

    def give_mask(self, sample: int, mask: bytes) -> None:
        """Write the mask of a sample that waits for one, from any thread.

        It comes to nothing where the step has ended, or has found the row late.
        """
        assert self._masks is not None, "no row of the step has a mask"
        self._masks.give(sample, mask)

    def wait(self) -> Sampled:
        """Block until the step is complete, and return what it sampled."""
        try:
            ago_ns = 0 if self._wait is None else self._wait()
            sampled = self._read()
        finally:  # of a step that failed, too, another may have the places next
            if self._masks is not None:
                self._masks.close()
        if self._masks is not None:
            sampled = replace(sampled, outcomes=self._masks.outcomes(sampled.outcomes))
        return replace(sampled, ended_ago_ns=ago_ns) if ago_ns else sampled
