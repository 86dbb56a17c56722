"""After a step that failed: who of its sequences is at fault?

The step is computed again in halves, and a half that fails in halves of its own, one after the
other; only a sequence that fails alone ends. Where memory was too short it is tried alone with ever
fewer tokens first. All others have lost nothing but time.
"""

from collections import deque

from slipstream.core.sequence import Sequence, SequenceStatus


class Trial:
    """Groups of sequences, each of which runs by itself until a step of it succeeds."""

    def __init__(self) -> None:
        self._groups: deque[tuple[list[Sequence], int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def current(self) -> tuple[frozenset[int], int] | None:
        """The ids of those who run now, and how many tokens a step may have; None: no trial."""
        while self._groups:
            group, max_tokens = self._groups[0]
            ids = frozenset(s.id for s in group if s.status is SequenceStatus.RUNNING)
            if ids:
                return ids, max_tokens
            self._groups.popleft()
        return None

    def succeed(self) -> None:
        """The group that ran is not at fault."""
        if self._groups:
            self._groups.popleft()

    def fail(
        self, owners: list[Sequence], num_tokens: int, is_short_of_memory: bool
    ) -> Sequence | None:
        """The sequence that is at fault, if that is clear now; else there are new groups.

        Args:
            owners: of the rows of the step that failed.
            num_tokens: of that step.
            is_short_of_memory: fewer tokens might do.
        """
        was_trial = bool(self._groups)
        self.succeed()
        half = len(owners) // 2
        if half:
            num_tokens = max(num_tokens // 2, len(owners) - half)
            self._groups.extendleft([(owners[half:], num_tokens), (owners[:half], num_tokens)])
        elif is_short_of_memory and num_tokens > 1:
            self._groups.appendleft((owners, num_tokens // 2))
        elif not was_trial:  # a second time, in case that it was not its own fault
            self._groups.appendleft((owners, num_tokens))
        else:
            return owners[0]
        return None
