"""Define the work of one step: what the scheduler decided, and all that the runner may know."""

from dataclasses import dataclass
from enum import IntEnum

import msgspec
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams


class Row(msgspec.Struct, frozen=True, gc=False):
    """The part of a step that belongs to one sequence.

    The row computes `token_ids` at positions `start`, `start + 1`, ... If `samples`, it also
    samples output number `num_outputs` of the sequence from the logits of its last token.

    Each of `tables` (one a layer group) covers at least positions `0 .. start + len(token_ids) - 1`
    with its blocks; a table of windowed layers covers those positions that are still visible. With
    a `gap`, the token at position p is stored at place `p - gap`, unless it is an attention sink.

    A sequence keeps its `slot` from its first row after admission until it is preempted or ends. If
    `is_new`, the runner discards the tables and sampling state that it has for the slot.
    """

    sequence_id: int
    slot: int  # 0 .. max_num_seqs - 1
    token_ids: TokenIds
    start: int
    tables: tuple[list[int], ...]
    samples: bool
    sampling: SamplingParams
    seed: int  # 64 bits; with `num_outputs` the whole state of this row's random numbers
    num_outputs: int
    edits: bytes = b""  # records of `edits.EDIT`
    source: int = -1  # >= 0: the one token is sample number `source` of the step launched before
    is_new: bool = True
    num_prompt: int = 0  # tokens of the prompt
    # Prompt and output, if the runner has to count their tokens anew for the penalties.
    history: TokenIds | None = None
    gap: int = 0  # tokens behind the sinks that are no longer in `tables`


@dataclass(slots=True, eq=False)
class BlockCopy:
    """A copy of a shared block into a block of one sequence.

    `is_void` is set when that sequence releases its blocks before the copy has run.
    """

    source: int
    target: int
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step: `rows[:num_decodes]` sample after one token each; then prefill chunks."""

    rows: tuple[Row, ...]
    num_decodes: int
    continues: bool = False  # same sequences as the step launched before, one token further each
    copies: tuple[tuple[int, int], ...] = ()  # (source, target) blocks, copied before the rows run

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(row.token_ids) for row in self.rows)


class Outcome(IntEnum):
    """What became of a row that samples; kernels write it as a byte."""

    NOT_FINITE = 0  # a logit was NaN, or none was finite: the token means nothing
    SAMPLED = 1
    LATE = 2  # its constraint had not come: there is no token, and the row has to be run again
    UNMASKED = 3  # the same, but the token is right if the constraint allows it


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step: one entry per row with `samples`, in row order."""

    token_ids: list[int]
    log_probs: list[float]  # of the sampled token, under the softmax of the edited logits
    outcomes: list[int]  # `Outcome` of each
