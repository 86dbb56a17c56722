"""Define the work of one step: what the scheduler decided, and all that the runner may know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import msgspec
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams

from slipstream.core.two_way import ONE_WAY, Sight
from slipstream.wire import Likely


class PromptAsk(msgspec.Struct, frozen=True, gc=False):
    """Values wanted of a part of a prompt: the tokens of a row from `first` on."""

    first: int  # of the row's tokens
    next_ids: TokenIds  # the tokens behind them; one less where the prompt ends
    num_top: int  # likeliest tokens at the place of each of `next_ids`; -1: no log probs
    mode: int  # flags of `TopMode`, of which prompts know LOGITS alone
    has_logits: bool  # whole logits of each token


class Row(msgspec.Struct, frozen=True, gc=False):
    """The part of a step that belongs to one sequence.

    A sequence has one row, or with drafts a row for each of several tokens, one after another, over
    the same tables. All rows write keys and values before any of them attends.

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
    num_top: int = -1  # of a row that samples: so many likeliest tokens are wanted; -1: no `Top`
    top_mode: int = 0  # flags of `TopMode`
    logits_mode: int = -1  # of a row that samples: whole logits by this `TopMode`; -1: none
    prompt: PromptAsk | None = None
    num_drafts: int = 0  # that a drafter on the device makes at most behind the sample
    # One bit a token, 1: it may be sampled. Empty: the mask is given while the step runs.
    mask: bytes | None = None
    moved: tuple[tuple[str, float], ...] = ()  # fields of the device's record for this row alone
    needs_mask: bool = True  # False: if the mask is late, it is sampled without
    adapter: int = 0  # the runner's number of it; 0: none
    sight: Sight = ONE_WAY  # of the whole sequence


class TopMode(IntFlag):
    """What the values of a `Top` are; 0: log probs before any edit."""

    PROCESSED = 1  # of what is sampled from: after edits, penalties, temperature and filters
    LOGITS = 2  # logits instead of log probs


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
    """The rows of a step: `rows[:num_decodes]` sample after one token each; then prefill chunks.

    `num_drafts` of the decodes have a draft as their token. They follow the row of their sequence's
    last known token, one position further each: see `core/drafts.py`.
    """

    rows: tuple[Row, ...]
    num_decodes: int
    continues: bool = False  # same sequences as the step launched before, one token further each
    copies: tuple[tuple[int, int], ...] = ()  # (source, target) blocks, copied before the rows run
    may_have_tops: bool = True  # False: no row wants values beside its sample; none is looked at
    num_drafts: int = 0
    has_masks: bool = False  # False: no row has one; none is looked at

    @property
    def has_own(self) -> bool:
        """Whether a row has edits or parameters that hold for this step alone."""
        return any(row.edits or row.moved for row in self.rows)

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


class Top(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The likeliest tokens at a place of an output, and how likely the sampled one was."""

    token_ids: list[int]  # by falling value, equal ones by rising id
    log_probs: list[float]  # of each; logits by `TopMode.LOGITS`
    rank: int  # of the sampled token in that order, from 1
    log_prob: float  # of the sampled token


class PromptValues(msgspec.Struct, frozen=True, gc=False):
    """What a `PromptAsk` got: the values of tokens of the prompt from position `start` on."""

    start: int
    num_positions: int
    likely: Likely | None  # of the tokens behind these positions
    logits: bytes  # fp32 `[num_positions, vocab]`, or empty


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step: one entry per row with `samples`, in row order."""

    token_ids: list[int]
    log_probs: list[float]  # of the sampled token, under the softmax of the edited logits
    outcomes: list[int]  # `Outcome` of each
    tops: Mapping[int, Top] = field(default_factory=dict)  # of the samples whose row wants one
    logits: Mapping[int, bytes] = field(default_factory=dict)  # the same; fp32 `[vocab]`
    prompts: Mapping[int, PromptValues] = field(default_factory=dict)  # by the row's number
    # Sample number -> drafts of what follows that sample, of rows that asked for some. Of several
    # rows of a sequence, that which samples the first token that the next row does not have.
    drafts: Mapping[int, list[int]] = field(default_factory=dict)
    draft_ns: int = 0  # of the step's time, what the drafter on the device took
    ended_ago_ns: int = 0  # since the device ended the step, when the host saw that it had

    def part(self, numbers: slice) -> "Sampled":
        """Return the entries of some rows."""
        return Sampled(self.token_ids[numbers], self.log_probs[numbers], self.outcomes[numbers])
