"""Masks of rows: which tokens may be sampled, written by the host while the step computes.

A mask has one bit a token, token t at bit t % 8 of byte t // 8; where it is 0 the logit becomes
-inf before `sample` reads it. Each place of the results has a mask and a tag in pinned memory. The
host writes the mask, then the tag that the row's record wants; the kernel looks at the tag when the
logits are there. A row whose tag is missing then waits for nobody: it is `LATE`, or is sampled
without its mask if the record wants the tag with a minus (see `Outcome.UNMASKED`).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import Outcome
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op
from slipstream.kernels.runtime.team import THREADS
from slipstream.kernels.sampling.sample import ROW, ROW_WORDS, variant_of

assert ROW.fields is not None
MASK_TAG, _RESULT = (ROW.fields[name][1] // 4 for name in ("mask_tag", "result"))


class Masks(NamedTuple):
    """The masks of `r` results, where the host writes them; pinned for a GPU."""

    tags: Tensor  # [r] i32: of the mask that is there
    bits: Tensor  # [r, m] u8, m a multiple of 16
    applied: Tensor  # [r] u8, written: 1 where a row got its mask


def mask_bytes(num_tokens: int) -> int:
    """Return the size of a place's mask, which is read 16 bytes at a time."""
    return -(-num_tokens // 128) * 16


@op(f"logits[n,v]:T, rows[n,{ROW_WORDS}]:i32, outcomes[r]:u8")
def constrain(
    logits: Tensor,
    rows: Tensor,
    outcomes: Tensor,
    masks: Masks,
    mirror: Tensor | None = None,
) -> None:
    """Ban in place what the masks of rows forbid, as `rows.mask_tag` says.

    Args:
        logits: `[n, v]` fp32, fp16 or bf16, written.
        rows: `ROW` records as words; the result of a row that is late becomes -1.
        outcomes: `[r]`, written for rows that are late.
        masks: of the `r` places of the results.
        mirror: of the outcomes, in pinned memory.
    """
    words = rows.cpu().numpy()
    tags, results = words[:, MASK_TAG], words[:, _RESULT]
    for n in np.flatnonzero((tags != 0) & (results >= 0)).tolist():
        wanted, place = int(tags[n]), int(results[n])
        if int(masks.tags[place]) == abs(wanted):
            masks.applied[place] = 1
            logits[n, ~_legal(masks.bits[place], logits.shape[1])] = float("-inf")
        elif wanted > 0:
            rows[n, _RESULT] = -1
            for out in (outcomes, *(() if mirror is None else (mirror,))):
                out[place] = int(Outcome.LATE)


def _legal(bits: Tensor, num_tokens: int) -> Tensor:
    """Return `[num_tokens]` bool of a mask."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((bits.cpu()[:, None] >> shifts) & 1).flatten()[:num_tokens].bool()


@functools.cache
def _variant(dtype: torch.dtype) -> jit.Variant:
    return variant_of("sampling/constrain.cu", dtype)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from map(_variant, jit.DTYPES)


@constrain.cuda
def _constrain(
    logits: Tensor,
    rows: Tensor,
    outcomes: Tensor,
    masks: Masks,
    mirror: Tensor | None = None,
) -> None:
    num_rows, num_tokens = logits.shape
    jit.require(logits.stride(1) == 1 or num_tokens == 1, "constrain: rows must be contiguous")
    jit.require(rows.is_contiguous(), "constrain: records must be contiguous")
    jit.require(
        masks.bits.shape[1] >= mask_bytes(num_tokens) and masks.bits.shape[1] % 16 == 0,
        f"constrain: masks of {masks.bits.shape[1]} bytes",
    )
    if num_rows == 0:
        return
    jit.launch(
        _variant(logits.dtype),
        "constrain",
        (num_rows,),
        THREADS,
        *(logits, logits.stride(0), num_tokens, rows),
        *(masks.tags.data_ptr(), masks.bits.data_ptr(), masks.bits.shape[1]),
        *(masks.applied.data_ptr(), outcomes, 0 if mirror is None else mirror.data_ptr()),
        overlaps=True,
    )
