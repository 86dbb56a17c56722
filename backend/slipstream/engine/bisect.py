"""Find the sequence that makes a step fail.

The step is run again in halves, and a half that fails in halves of its own, one after the other;
only a sequence that fails alone ends. If memory was too short, it is first tried alone with ever
fewer tokens. All other sequences lose nothing but time.
"""

from collections import deque

from slipstream.core.sequence import Sequence, SequenceStatus

# Exceptions after which every call to a CUDA context fails alike, or ranks are at different steps.
_STICKY = {"AcceleratorError", "CUDARuntimeError", "CUDADriverError", "RankError"}


def is_of_device(error: Exception) -> bool:
    """Whether the device itself has failed, and is beyond repair."""
    return bool(_STICKY & {kind.__name__ for kind in type(error).__mro__})


class Bisection:
    """Groups of sequences, each of which runs by itself until one of its steps succeeds."""

    def __init__(self) -> None:
        self._groups: deque[tuple[list[Sequence], int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def current(self) -> tuple[frozenset[int], int] | None:
        """Return the ids of the group to run now and its most tokens a step, or None."""
        while self._groups:
            group, max_tokens = self._groups[0]
            ids = frozenset(s.id for s in group if s.status is SequenceStatus.RUNNING)
            if ids:
                return ids, max_tokens
            self._groups.popleft()
        return None

    def succeed(self) -> None:
        """Clear the group that ran."""
        if self._groups:
            self._groups.popleft()

    def fail(
        self, owners: list[Sequence], num_tokens: int, is_short_of_memory: bool
    ) -> Sequence | None:
        """Return the sequence that makes steps fail; None if further groups must be tried first.

        Args:
            owners: sequences of the rows of the step that failed.
            num_tokens: tokens of that step.
            is_short_of_memory: whether fewer tokens might succeed.
        """
        was_trial = bool(self._groups)
        self.succeed()
        half = len(owners) // 2
        if half:
            num_tokens = max(num_tokens // 2, len(owners) - half)
            self._groups.extendleft([(owners[half:], num_tokens), (owners[:half], num_tokens)])
        elif is_short_of_memory and num_tokens > 1:
            self._groups.appendleft((owners, num_tokens // 2))
        elif not was_trial:  # once more: the failure may not be its fault
            self._groups.appendleft((owners, num_tokens))
        else:
            return owners[0]
        return None
