"""The work of one step, frozen: what the scheduler decided and all that the runner may know."""

from dataclasses import dataclass

from slipstream_contract.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """A change to one token's logit: `l / factor if l > 0 else l * factor`, then `+ addend`."""

    token_id: int
    factor: float
    addend: float


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: `token_ids` at positions `start`, `start + 1`, ...

    `block_ids` covers at least positions `0 .. start + len(token_ids) - 1`. If `samples`, the
    logits of the last token are turned into token number `num_outputs` of the sequence's output.
    """

    sequence_id: int
    token_ids: list[int]
    start: int
    block_ids: list[int]
    samples: bool
    sampling: SamplingParams
    seed: int  # 64 bits; with `num_outputs` the whole state of this row's random numbers
    num_outputs: int
    edits: tuple[LogitEdit, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one token that sample come first: `rows[:num_decodes]`; then chunks of any length."""

    rows: tuple[Row, ...]
    num_decodes: int

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
