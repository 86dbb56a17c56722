"""Drafts that the device makes right behind a step's samples: asked for by rows, kept till used."""

from collections.abc import Mapping
from collections.abc import Sequence as Many

from msgspec.structs import replace

from slipstream.core.batch import Batch, Row
from slipstream.core.drafts import Proposal, can_have_drafts
from slipstream.core.sequence import Sequence, SequenceStatus

_MAX_ROWS = 64  # of a step that asks: beyond, rows of drafts cost as much as they bring


class DeviceDrafts:
    """The newest drafts of each sequence; a `Drafter`.

    Args:
        name: of the drafter on the device.
        max_drafts: of a sequence in a step.
    """

    def __init__(self, name: str, max_drafts: int) -> None:
        self._name = name
        self._max_drafts = max_drafts
        self._found: dict[int, tuple[int, list[int]]] = {}  # number of tokens before; drafts

    def ask(self, rows: list[Row]) -> list[Row]:
        """Return the rows of a step, which now ask for drafts where these can be verified."""
        if sum(row.samples for row in rows) > _MAX_ROWS:
            return rows
        count = self._max_drafts
        return [
            replace(row, num_drafts=count) if row.samples and can_have_drafts(row.sampling) else row
            for row in rows
        ]

    def take(
        self, batch: Batch, samplers: Many[Sequence | None], drafts: Mapping[int, list[int]]
    ) -> None:
        """Keep the drafts of a step, by number of the sample before them."""
        rows = [row for row in batch.rows if row.samples]
        for number, found in drafts.items():
            sequence, row = samplers[number], rows[number]
            if sequence is not None and sequence.status is not SequenceStatus.FINISHED:
                num_known = row.num_prompt + row.num_outputs + 1
                self._found[sequence.id] = (num_known, found)

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return at most `k` drafts of what follows the known tokens, if the last step made any."""
        num_known, drafts = self._found.get(sequence.id, (-1, []))
        return Proposal(drafts[:k] if num_known == sequence.num_known else [], self._name)

    def release(self, sequence: Sequence) -> None:
        """Discard the drafts of a sequence, which has ended."""
        self._found.pop(sequence.id, None)
