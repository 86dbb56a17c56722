"""A step between its launch and its results."""

from collections.abc import Callable
from dataclasses import replace

import torch

from slipstream.core.batch import Sampled
from slipstream.runner.masks import StepMasks


class LaunchedStep:
    """A step on its way.

    Args:
        read: returns its results; without a device it computes them.
        masks: of its rows, if any has one.
        done: event behind the step in the device's stream.
    """

    def __init__(
        self,
        read: Callable[[], Sampled],
        masks: StepMasks | None = None,
        done: torch.cuda.Event | None = None,
    ) -> None:
        self._read = read
        self._masks = masks
        self._done = done

    def give_mask(self, sample: int, mask: bytes) -> None:
        """Write the mask of a sample that waits for one, from any thread.

        It comes to nothing where the step has ended, or has found the row late.
        """
        assert self._masks is not None, "no row of the step has a mask"
        self._masks.give(sample, mask)

    def wait(self) -> Sampled:
        """Block until the step is complete, and return what it sampled."""
        try:
            if self._done is not None:
                self._done.synchronize()
            sampled = self._read()
        finally:  # of a step that failed, too, another may have the places next
            if self._masks is not None:
                self._masks.close()
        if self._masks is None:
            return sampled
        return replace(sampled, outcomes=self._masks.outcomes(sampled.outcomes))
