"""Speculation: drafts of a sequence's next tokens, verified by the step that computes them.

A step with k drafts has k + 1 rows of a sequence: of its last known token, and of each draft. Row i
samples output number n + i with that number's own random numbers, and its token counts if all
drafts before it were right:

    rows     last known    draft 1    draft 2    draft 3
    sampled  draft 1       draft 2    other      (void)
    output   draft 1, draft 2, other

Each token that is kept was sampled after exactly the tokens before it. So whatever is proposed, a
sequence gets the tokens that it gets without drafts; a draft decides only how soon. (But for
`Speculation.accepted`, which load tests use.)
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream_contract.sampling import SamplingParams

from slipstream.core.batch import Batch, Row
from slipstream.core.edits import counts_tokens
from slipstream.core.moving import moves

if TYPE_CHECKING:
    from slipstream.core.sequence import Sequence


class Proposal(NamedTuple):
    """Tokens that may follow the known ones of a sequence."""

    token_ids: list[int]
    drafter: str  # the name of what proposes them
    # Of each, how likely it is right if all before it are; None: what was learned of the drafter.
    chances: list[float] | None = None
    is_certain: bool = False  # the chances are right, so that nothing is learned of them


class Drafter(Protocol):
    """A source of drafts."""

    def propose(self, sequence: "Sequence", k: int) -> Proposal:
        """Return at most `k` tokens that may follow the known ones of a sequence.

        It has at least one output. A pending token is not known: it is the first one proposed.
        """

    def release(self, sequence: "Sequence") -> None:
        """Discard what is held of a sequence, which has ended; called once, or never."""


Accepted = Callable[["Sequence", int], int]
"""From a sequence and the number of its drafts to how many count as right: see `accepted`."""


class Speculation(Protocol):
    """The decision which sequences get how many drafts, and whose.

    `accepted` is None, but for load tests: then so many drafts count as right, and are tokens of
    the output, whatever is sampled.
    """

    accepted: Accepted | None

    def propose(
        self, decodes: list["Sequence"], max_drafts: int
    ) -> Iterable[tuple["Sequence", list[int]]]:
        """Return drafts for some of a step's decodes, at most `max_drafts` tokens together.

        Those of `decodes` that have pending tokens get none. Sets `Sequence.is_speculating` of
        those that share a step with drafts: none is scheduled while a token of any is pending.
        """

    def verified(
        self, sequence: "Sequence", num_drafts: int, num_right: int, num_wrong: int
    ) -> str:
        """Note what became of `num_drafts` drafts: the first were right, the next was wrong.

        What was behind a wrong one, or behind the end of the sequence, is not judged. Returns the
        name of their drafter.
        """

    def step_took(self, batch: Batch, took_ns: int) -> None:
        """Note how long a step took, from its launch or the end of the one before it, in ns."""

    def release(self, sequence: "Sequence") -> None:
        """Discard what is held of a sequence, which has ended."""


def can_have_drafts(sampling: SamplingParams) -> bool:
    """Return whether drafts can be verified: not where a token changes how the next is sampled.

    Penalties count each token, parameters may move with it, and beams depend on each other.
    """
    return not (counts_tokens(sampling) or moves(sampling) or sampling.beams is not None)


def sequence_can_have_drafts(sequence: "Sequence") -> bool:
    """Return whether drafts of a sequence can be verified: virtual tokens are in no text."""
    return can_have_drafts(sequence.sampling) and not sequence.has_virtual


def most_drafts(sequence: "Sequence", most: int) -> int:
    """Return how many drafts a step may have of a sequence: `most`, or fewer if it asked so."""
    drafts = sequence.sampling.drafts
    return most if drafts is None or drafts.most is None else min(most, drafts.most)


def together(decodes: list["Sequence"], running: Iterable["Sequence"]) -> list["Sequence"]:
    """Return the decodes of a step: those that wait for tokens wait for each other, too.

    If they took turns, each step would read all weights for a part of them.
    """
    if any(sequence.is_speculating and sequence.num_pending for sequence in running):
        return [sequence for sequence in decodes if not sequence.is_speculating]
    return decodes


def take_runs(batch: Batch, samplers: list["Sequence | None"]) -> list[tuple["Sequence", slice]]:
    """Take sequences with drafts from the samplers of a step: each, and the numbers of its rows."""
    runs: list[tuple[Sequence, slice]] = []
    rows, start = batch.rows, 0
    for end in range(1, batch.num_decodes + 1):  # decodes sample: their rows are their samples
        if end < batch.num_decodes and rows[end].sequence_id == rows[start].sequence_id:
            continue
        sequence = samplers[start]
        if end - start > 1 and sequence is not None:
            runs.append((sequence, slice(start, end)))
            samplers[start:end] = [None] * (end - start)
        start = end
    return runs


def is_right(sequence: "Sequence", row: Row) -> bool:
    """Return whether a row's draft is the token that was sampled right before it, and is known."""
    is_known = sequence.num_known == row.start + 1
    return is_known and sequence.outputs[-1] == row.token_ids[0]
