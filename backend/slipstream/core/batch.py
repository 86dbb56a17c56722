"""The work of one step, frozen: what the scheduler decided and all that the runner may know."""

from dataclasses import dataclass

import msgspec
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: `token_ids` at positions `start`, `start + 1`, ...

    Each of `tables`, one for each group of layers, covers at least the positions
    `0 .. start + len(token_ids) - 1` by its blocks; of a window, those that are seen, and with a
    `gap` the token at position p has the place `p - gap`, unless it is a sink.
    If `samples`, the logits of the last token are turned into token number `num_outputs` of the
    sequence's output.
    A `slot` is its sequence's alone from the first row after admission on. If `is_new`, what its
    rows before said of tables and sampling does not count.
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
    num_prompt: int = 0
    history: TokenIds | None = None  # prompt and output, when what was counted of it is not kept
    gap: int = 0  # tokens behind the sinks that are no longer in `tables`


@dataclass(slots=True, eq=False)
class Copy:
    """Of a block that is shared until it is done, to one of a sequence; void if that let go."""

    source: int
    target: int
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one token that sample come first: `rows[:num_decodes]`; then chunks of any length."""

    rows: tuple[Row, ...]
    num_decodes: int
    continues: bool = False  # the sequences of the step launched before, each one token further
    copies: tuple[tuple[int, int], ...] = ()  # of blocks, from and to, before all else

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole ragged batch."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per row with `samples`, in row order."""

    token_ids: list[int]
    log_probs: list[float]  # of the sampled token, under the softmax of the edited logits
    is_finite: list[bool]  # False: a logit of the row was NaN, the token means nothing
