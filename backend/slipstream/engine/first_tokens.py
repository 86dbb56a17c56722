"""Say what each first token waited for: a journal of steps, as running totals.

From a request's arrival to its first token, by the engine's clock:

    arrival ─ received ─ queue ─ launched ─ step_before ─ first step of it ... last step ─ token
                                                          own_chunks, other_prompts, streams, host

The time of a step is divided into what its decodes take alone, which is the streams' part, and the
rest, which is shared among the chunks by their tokens. `host` is time in which the device had no
step. A step adds to three totals, and a sequence whose first step it is keeps them: what the first
token waited for is the difference. A step without chunks costs nothing more, whatever runs.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

from slipstream.core.batch import Batch
from slipstream.core.first_wait import FirstWait
from slipstream.core.sequence import Sequence
from slipstream.figures import FIRST_TOKEN_PARTS


class StepSpan(NamedTuple):
    """A step that has ended: when it was launched, began and ended, and its decodes' part, in ns.

    `decodes_ns` is what its decodes take alone.
    """

    launched_ns: int
    begin_ns: int
    end_ns: int
    decodes_ns: float

    @property
    def took_ns(self) -> int:
        """How long it ran."""
        return self.end_ns - self.begin_ns


class FirstTokens:
    """Totals of all steps, and what is kept of them for sequences without a token."""

    def __init__(self) -> None:
        self._streams_ns = 0.0
        self._chunks_ns = 0.0
        self._host_ns = 0.0
        self._last = StepSpan(0, 0, 0, 0.0)
        self._before = (0, 0, 0.0, 0.0, 0.0)  # the last step, as a `FirstWait` has it

    def step_ended(self, span: StepSpan, batch: Batch, owners: Many[Sequence]) -> None:
        """Add a step, before its samples are; `owners` are the sequences of its rows."""
        self._host_ns += max(0, span.begin_ns - self._last.end_ns)
        totals = self._streams_ns, self._chunks_ns, self._host_ns
        self._before = before = (span.launched_ns, span.begin_ns, *totals)
        self._last = span
        num_decodes = batch.num_decodes
        if num_decodes == len(batch.rows):
            self._streams_ns += span.took_ns
            return
        streams_ns = min(span.took_ns, span.decodes_ns)
        chunks_ns = span.took_ns - streams_ns
        self._streams_ns += streams_ns
        self._chunks_ns += chunks_ns
        token_ns = chunks_ns / (batch.num_tokens - num_decodes)
        for sequence, row in zip(owners[num_decodes:], batch.rows[num_decodes:], strict=True):
            if not sequence.first_token_ns:
                if sequence.first_wait is None:
                    sequence.first_wait = FirstWait(*before)
                sequence.first_wait.own_ns += token_ns * len(row.token_ids)

    def parts_s(self, sequence: Sequence) -> dict[str, float]:
        """Return what the first token waited for, in s; its step is the last that ended.

        A prompt of which one token had to be computed has no chunk, and its step is the streams'.
        """
        if sequence.first_wait is None:
            sequence.first_wait = FirstWait(*self._before)
        wait = sequence.first_wait
        chunks_ns = self._chunks_ns - wait.chunks_ns
        parts_ns = (
            sequence.queued_ns - sequence.request.message.arrival_ns,
            wait.launched_ns - sequence.queued_ns,
            wait.begin_ns - wait.launched_ns,
            wait.own_ns,
            chunks_ns - wait.own_ns,
            self._streams_ns - wait.streams_ns,
            self._host_ns - wait.host_ns,
        )
        named = zip(FIRST_TOKEN_PARTS, parts_ns, strict=True)
        wait.parts_s = {name: max(0.0, part_ns / 1e9) for name, part_ns in named}
        return wait.parts_s
