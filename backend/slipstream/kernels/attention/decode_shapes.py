"""CTA shapes and variants of decode.cu."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from slipstream.kernels.attention.rules import (
    CAPPED,
    PLAIN,
    SINKING,
    SLOPED,
    Case,
    no_decode_plan,
    no_rotation,
    no_sharing,
    no_sinks,
)
from slipstream.kernels.attention.scores import macros
from slipstream.kernels.cache import kv_format
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError

COLUMNS = 8  # decode_part.cuh: query heads that a worker takes at once
_TILE, _INT4_TILE = 32, 64


def part_words(head_size: int) -> int:
    """Return the words of a `Part` (decode_part.cuh)."""
    return COLUMNS * (head_size + 4 + 2)


def state_words(head_size: int) -> int:
    """Return the words of a `State` (decode_part.cuh)."""
    return head_size + 4


def tile_of(cached: torch.dtype, head_size: int) -> int:
    """Tokens that a worker takes at once from such a cache."""
    return _INT4_TILE if cached == torch.uint8 and not jit.has_large_heads(head_size) else _TILE


class CtaShape(NamedTuple):
    """The shape of a CTA of decode.cu."""

    warps: int
    slots: int  # of a warp's ring, each of a tile's K or V

    def shared_memory(self, dtype: torch.dtype, head_size: int) -> int:
        """Bytes, over such a cache: for each warp a ring, a part and two entries; two flags."""
        scales = kv_format.num_scales(dtype, head_size)
        chunks = (kv_format.row_size(dtype, head_size) - scales) * dtype.itemsize // 16
        is_swizzled = chunks.bit_count() == 1
        row = 16 * (chunks if is_swizzled or chunks % 2 else chunks + 1)
        alignment = max(row, 128) if is_swizzled else 128
        slot = -(-tile_of(dtype, head_size) * (row + scales) // alignment) * alignment
        return self.warps * (self.slots * slot + 4 * part_words(head_size) + 2 * 16) + 16


_SHAPES = (CtaShape(8, 3), CtaShape(8, 2), CtaShape(4, 2))
_LARGE_HEAD_SHAPES = (CtaShape(4, 3), CtaShape(4, 2), CtaShape(2, 2))
# With bytes, more warps hide more arithmetic, but with large heads each has too few registers.
_BYTE_SHAPES = (CtaShape(12, 3), *_SHAPES)
_LARGE_HEAD_BYTE_SHAPES = (CtaShape(8, 2), CtaShape(4, 2))


def shapes(cached: torch.dtype, head_size: int) -> tuple[CtaShape, ...]:
    """Return the shapes of CTAs over such a cache; the first that fits is best."""
    is_large = jit.has_large_heads(head_size)
    if cached == torch.uint8:
        return _SHAPES
    if cached in kv_format.FORMATS.values():
        return _LARGE_HEAD_BYTE_SHAPES if is_large else _BYTE_SHAPES
    return _LARGE_HEAD_SHAPES if is_large else _SHAPES


@functools.cache
def attention_variant(
    dtype: torch.dtype,
    head_size: int,
    shape: CtaShape,
    rotates: bool,
    window: int,
    shares: bool = False,
    cached: torch.dtype | None = None,
    streams: bool = False,
    scores: str = PLAIN,
) -> jit.Variant:
    """The instantiation of decode.cu; `cached` is the cache's dtype, `scores` as in rules.py."""
    jit.head_size_of(dtype, head_size)
    if streams and (reason := no_sinks(Case(dtype, cached or dtype, head_size, scores=scores))):
        raise KernelError(reason)
    return jit.variant(
        "attention/decode.cu",
        dtype,
        HEAD_SIZE=head_size,
        TILE=tile_of(cached or dtype, head_size),
        WARPS=shape.warps,
        SLOTS=shape.slots,
        ROTATES=int(rotates),
        **_mode(window, shares, streams),
        **macros(scores),
        **kv_format.macros(cached or dtype),
    )


def is_planned(cached: torch.dtype, head_size: int) -> bool:
    """Whether attention over such a cache is by plan; else it is by split, a plan or not."""
    return no_decode_plan(Case(cached, cached, head_size)) is None


def _mode(window: int, shares: bool, streams: bool) -> dict[str, int]:
    additions = {"SHARES": 1} if shares else {"SINKS": 1} if streams else {}
    return {"WINDOWED": int(window > 0)} | additions


@functools.cache
def plan_variant(
    tile: int, window: int, shares: bool = False, streams: bool = False
) -> jit.Variant:
    """The instantiation of decode_plan.cu."""
    return jit.variant("attention/decode_plan.cu", TILE=tile, **_mode(window, shares, streams))


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for tile, window in itertools.product((_TILE, _INT4_TILE), (0, 1)):
        yield plan_variant(tile, window)
    yield plan_variant(_TILE, 0, shares=True)
    yield plan_variant(_TILE, 1, streams=True)
    dtypes, formats = (torch.float16, torch.bfloat16), kv_format.FORMATS.values()
    modes = itertools.product(
        ((0, False, False), (1, False, False), (0, True, False), (1, False, True)),
        (PLAIN, CAPPED, SLOPED, SINKING),
    )
    cases = itertools.product(dtypes, jit.HEAD_SIZES, modes)
    for dtype, head_size, ((window, shares, streams), scores) in cases:
        for cached in (dtype, *formats):
            case = Case(dtype, cached, head_size, bool(window), scores=scores)
            is_taken = not (shares and no_sharing(case)) and not (streams and no_sinks(case))
            if no_decode_plan(case) or not is_taken:
                continue
            rotations = (False,) if no_rotation(case) else (False, True)
            for shape, rotates in itertools.product(shapes(cached, head_size), rotations):
                mode = (rotates, window, shares, cached, streams, scores)
                yield attention_variant(dtype, head_size, shape, *mode)
