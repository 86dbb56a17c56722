"""Drafts that a request brings or asks for: guesses of its next tokens, each of them verified.

A draft counts if it is the token that is sampled in its place, so nothing here changes a token: a
right draft only lets it come sooner. TensorRT-LLM's tensors are read so:

- `draft_input_ids` are guesses of the first outputs. `draft_logits`, with which the old contract
  could accept other tokens than the sampled ones, are checked and say nothing more.
- `num_draft_tokens` asks for drafts of the engine's own, at most so many a step.
- `lookahead_*` ask for the same: the n-grams of lookahead decoding continue a token by N - 1.
"""

from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream_contract import limits
from slipstream_contract.errors import ContractError
from slipstream_contract.fields import BOTH, MODEL, Asked, Bounds, Field, Row, read_fields
from slipstream_contract.inputs import Inputs, token_ids

_IDS, _LOGITS, _THRESHOLD = "draft_input_ids", "draft_logits", "draft_acceptance_threshold"
_MOST, _USE_LOGITS = "num_draft_tokens", "use_draft_logits"


class Drafts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request says of drafts."""

    token_ids: Annotated[
        tuple[int, ...],
        Field(
            "guesses of the first outputs",
            trtllm=None,
            vllm=None,
            rows=(Row("`draft_input_ids`: ids", 0, limits.MAX_CLIENT_DRAFTS, BOTH),),
        ),
    ] = ()
    # None: what the engine does by itself.
    most: Annotated[
        int | None,
        Field(
            "drafts of the engine's own in a step, at most",
            Bounds(0, limits.MAX_DRAFT_TOKENS),
            trtllm=Asked(_MOST),
            vllm=None,
        ),
    ] = None


class Lookahead(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of lookahead decoding; all of its numbers or none are given."""

    window_size: Annotated[
        int | None,
        Field(
            "W, n-grams that are made at a time",
            Bounds(1, limits.MAX_LOOKAHEAD),
            trtllm=Asked("lookahead_window_size", refused_by=MODEL),
            vllm=None,
        ),
    ] = None
    ngram_size: Annotated[
        int | None,
        Field(
            "N, tokens of an n-gram",
            Bounds(1, limits.MAX_DRAFT_TOKENS + 1),
            trtllm=Asked("lookahead_ngram_size", refused_by=MODEL),
            vllm=None,
        ),
    ] = None
    verification_set_size: Annotated[
        int | None,
        Field(
            "G, n-grams that are verified at a time",
            Bounds(0, limits.MAX_LOOKAHEAD),
            trtllm=Asked("lookahead_verification_set_size", refused_by=MODEL),
            vllm=None,
        ),
    ] = None


_LOOKAHEAD = tuple(f"lookahead_{name}" for name in Lookahead.__struct_fields__)
DRAFT_NAMES = frozenset({_MOST, _USE_LOGITS, *_LOOKAHEAD})
"""Names by which a request parameter of any of TensorRT-LLM's models asks for drafts."""


def trtllm_drafts(read: Inputs, vocab_size: int | None = None) -> Drafts | None:
    """Return what TensorRT-LLM's inputs say of drafts; None: nothing. Raises ContractError.

    `vocab_size` is the model's, if known.
    """
    asked = read_fields(Drafts, "trtllm", read)["most"] or None
    if read.flag(_USE_LOGITS) and asked is None:
        raise ContractError(f"{_USE_LOGITS} is true, which has no effect without {_MOST} above 0")
    bounds = [bound for bound in (asked, _lookahead(read)) if bound is not None]
    ids = _ids(read, vocab_size)
    if not (ids or bounds):
        return None
    return Drafts(token_ids=ids, most=min(bounds, default=None))


def _lookahead(read: Inputs) -> int | None:
    """Return how many drafts a step of lookahead decoding accepts at most; None: it has none."""
    values = read_fields(Lookahead, "trtllm", read)
    missing = [f"lookahead_{name}" for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        given = next(name for name in _LOOKAHEAD if name not in missing)
        raise ContractError(
            f"{given} is given without {' and '.join(missing)}: all three are, or none is"
        )
    most: int = values["ngram_size"] - 1
    return most


def _ids(read: Inputs, vocab_size: int | None) -> tuple[int, ...]:
    array, logits = read.array(_IDS), read.array(_LOGITS)
    size = 0 if array is None else array.size
    limits.check_count(_IDS, size, limits.MAX_CLIENT_DRAFTS, "token ids")
    threshold = read.number(_THRESHOLD, 0.0)
    if threshold not in (0.0, 1.0):
        raise ContractError(
            f"{_THRESHOLD} is {threshold:.7g}, neither 0 nor 1: a draft counts if it is the token "
            "that is sampled in its place, and a threshold between would change the output"
        )
    if threshold and not size:
        raise ContractError(f"{_THRESHOLD} is 1, which has no effect without {_IDS}")
    if logits is not None and logits.size:
        _check_logits(logits, size, vocab_size)
    return () if array is None else tuple(token_ids(_IDS, array))


def _check_logits(logits: NDArray[Any], num_drafts: int, vocab_size: int | None) -> None:
    """Check that logits are finite, and a row of the whole vocabulary for each draft."""
    num_rows, width = logits.shape
    if num_rows != num_drafts:
        raise ContractError(f"{_LOGITS} has {num_rows} rows for {num_drafts} {_IDS}")
    if vocab_size is not None and width != vocab_size:
        raise ContractError(
            f"{_LOGITS} has rows of {width} values, the vocabulary has {vocab_size} tokens"
        )
    is_finite = np.isfinite(logits)
    if not is_finite.all():
        row, column = np.argwhere(~is_finite)[0].tolist()
        raise ContractError(
            f"{_LOGITS}[{row}, {column}] is {logits[row, column]}, not a finite number"
        )


def check_drafts(drafts: Drafts, has_beams: bool) -> None:
    """Raise ContractError for drafts beyond their bounds, and for those of a beam search."""
    limits.check_count(_IDS, len(drafts.token_ids), limits.MAX_CLIENT_DRAFTS, "token ids")
    if has_beams:
        raise ContractError(
            f"drafts ({_IDS}, {_MOST}, lookahead_ngram_size) and a beam search (beam_width): the "
            "next tokens of a beam depend on all beams, so that there is nothing to verify"
        )
