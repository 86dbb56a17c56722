"""Low-rank terms of the adapters of a step's rows, all of them in two launches a place.

`shrink` makes `t = x A^T` in fp32 and `expand` adds `t B^T` to what the base made, in fp32 and
rounded once. Which rows have which adapter, and where its matrices lie, is read from the device
(`Table`): so a CUDA graph of a step serves every mix of adapters and ranks, and rows without one.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

TILE = 16  # rows of a group at most; ranks are filled up to a multiple of it
PARTS = 3  # matrices that a place may have stacked
WORDS = 4  # of a term: where its tiles' addresses are, if B is turned, rank, first column of t
FEW_ROWS = 256  # whose sums are split, and whose norm `shrink` computes
SHARES = {64: 768, FEW_ROWS: 1536}  # inputs of a split, by the most rows; a CTA loads 768 at once
_SPLITS = 8  # at most: `expand` waits for each
_OUTPUTS = 256  # of a CTA that expands
_CTAS = 264  # that fill a GPU, about
_WAVE = (
    2 * _CTAS
)  # CTAs of a launch at most; each comes to several groups, of which most may be empty


class Table(NamedTuple):
    """The rows of a step that have adapters, in groups of at most `TILE` of one."""

    groups: (
        Tensor  # [g, 2] i64: where the adapter's terms are; first of `rows` | count << 32; then 0s
    )
    rows: Tensor  # [n] i32, in the order of groups
    marks: Tensor  # [n] i32: 1: the row has an adapter
    width: int  # of t: the ranks of a place together, at most
    scratch: Tensor | None = None  # of GEMMs that add terms themselves


class RowScale(NamedTuple):
    """An RMS norm of the rows that are multiplied."""

    weight: Tensor
    eps: float
    plus_one: bool


Pair = tuple[Tensor, Tensor]  # A `[r, inputs]` and B `[outputs, r]`
Addresses = Sequence[tuple[int, int]]  # of the tiles of `TILE` ranks of A and of B, on the device


def tiles_of(pair: Pair) -> list[Pair]:
    """Cut a pair into tiles: `[TILE, inputs]` of A, `[outputs, TILE]` of B; the last may be less.

    On the device each tile is filled up by zeros and lies somewhere in one piece.
    """
    a, b = pair
    ranks = [slice(first, first + TILE) for first in range(0, len(a), TILE)]
    return [(a[own], b[:, own]) for own in ranks]


def turned(b: Tensor) -> Tensor:
    """Return a tile of B `[outputs, r]` with the outputs of each 16 side by side, by rank:
    `[outputs filled up to 16, TILE]` in memory.
    """
    whole = b.new_zeros((-(-len(b) // TILE) * TILE, TILE))
    whole[: len(b), : b.shape[1]] = b
    return whole.view(-1, TILE, TILE).transpose(1, 2).reshape(-1, TILE).contiguous()


def describe(
    places: Sequence[Sequence[Addresses | None]], is_turned: bool = False
) -> tuple[Tensor, int]:
    """Return what a group points to, i64, and the width that it takes.

    First `[places, PARTS, WORDS]`, then the addresses of all tiles, which terms find by their
    number of words from the first.

    Args:
        places: of each its parts' tiles.
        is_turned: whether tiles of B are, as the processor's kernels have them; see `turned`.
    """
    words = [[0] * WORDS for _ in range(len(places) * PARTS)]
    tiles: list[int] = []
    width = 0
    for number, parts in enumerate(places):
        column = 0
        for part, addresses in enumerate(parts):
            if addresses is not None:
                rank = len(addresses) * TILE
                where = len(words) * WORDS + len(tiles)
                words[number * PARTS + part] = [where, int(is_turned), rank, column]
                tiles += [address for pair in addresses for address in pair]
                column += rank
        width = max(width, column)
    flat = [word for term in words for word in term]
    return torch.tensor(flat + tiles, dtype=torch.int64), width


@op("x[n,k]:T, groups[_,2]:i64, rows[n]:i32", package=__package__)
def shrink(
    x: Tensor,
    groups: Tensor,
    rows: Tensor,
    place: int,
    width: int,
    norm: RowScale | None = None,
    is_fixed: bool = False,
) -> Tensor:
    """Return `t` of the rows that have adapters, `[splits, n, width] f32` in the order of `rows`.

    The sum over splits counts. What no group has is not written.

    Args:
        x: rows that the place multiplies, or what its norm is of.
        groups, rows: of a `Table`.
        place: its number.
        width: columns of t.
        norm: of `x`, if it is not computed yet.
        is_fixed: whether a row's bits may not depend on how many rows there are.
    """
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps, norm.plus_one)
    found = x.new_zeros((1, len(x), width), dtype=torch.float32)
    for address, begin, end in _groups(groups):
        of_group = x[rows[begin:end].long()].float()
        for words in _terms(address, place):
            a = torch.cat(
                [_at(at, (TILE, x.shape[1]), x.dtype) for at in _tiles(address, words, 0)]
            )
            here = slice(words[3], words[3] + words[2])
            found[0, begin:end, here] = of_group @ a.float().t()
    return found


@op("y[n,_]:T, groups[_,2]:i64, rows[n]:i32, partial[_,n,_]:f32", package=__package__)
def expand(
    y: Tensor, groups: Tensor, rows: Tensor, partial: Tensor, place: int, sizes: Sequence[int]
) -> Tensor:
    """Add terms to `y`, in place: `t B^T` in fp32, then rounded once; returns it.

    Args:
        y: results of the place.
        groups, rows: of a `Table`.
        partial: what `shrink` made.
        place: its number.
        sizes: outputs of each part.
    """
    for address, begin, end in _groups(groups):
        own = rows[begin:end].long()
        first = 0
        for size, words in zip(sizes, _words(address, place), strict=False):
            here = slice(first, first := first + size)
            if not words[2]:
                continue
            b = torch.cat([_b_at(at, size, words, y.dtype) for at in _tiles(address, words, 1)], 1)
            t = partial[:, begin:end, words[3] : words[3] + words[2]].sum(0)
            y[own, here] = (y[own, here].float() + t @ b.float().t()).to(y.dtype)
    return y


def _groups(groups: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield of each group that is not empty where its terms are, and its part of the rows."""
    for address, place in groups.tolist():
        if address:
            begin = place & 0xFFFFFFFF
            yield address, begin, begin + (place >> 32)


def _words(address: int, place: int) -> list[list[int]]:
    at = address + 8 * place * PARTS * WORDS
    words: list[list[int]] = _at(at, (PARTS, WORDS), torch.int64).tolist()
    return words


def _terms(address: int, place: int) -> list[list[int]]:
    return [words for words in _words(address, place) if words[2]]


def _tiles(address: int, words: Sequence[int], which: int) -> list[int]:
    """Return where a term's tiles of A (0) or B (1) are."""
    found = _at(address + 8 * words[0], (words[2] // TILE, 2), torch.int64)
    tiles: list[int] = found[:, which].tolist()
    return tiles


def _b_at(address: int, size: int, words: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tile of B, `[size, TILE]`."""
    if not words[1]:
        return _at(address, (size, TILE), dtype)
    found = _at(address, (-(-size // TILE) * TILE, TILE), dtype)
    return turned(found)[:size]  # twice is the tile itself


def _at(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return what lies in the host's memory at an address."""
    size = shape[0] * shape[1] * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


# ---- on a GPU ----


def refusal(inputs: int, sizes: Sequence[int]) -> str | None:
    """Say why the kernels do not take a place; None: they do."""
    if len(sizes) > PARTS:
        return f"{len(sizes)} matrices, not {PARTS} at most"
    if inputs % 8 or any(size % 2 for size in sizes):
        return f"{inputs} inputs and {sizes} outputs, not multiples of 8 and 2"
    return None


def variant_of(dtype: torch.dtype) -> jit.Variant:
    """Name the kernels of a dtype of 16 bits."""
    return jit.variant("lora/terms.cu", dtype)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield variant_of(torch.float16)
    yield variant_of(torch.bfloat16)


def share_of(num_rows: int, inputs: int, is_fixed: bool) -> int:
    """Count the inputs of a split, a multiple of 32: of few rows what a CTA loads at once, if that
    makes no more splits than `_SPLITS`; more rows fill the GPU anyway.
    """
    whole = -(-inputs // 32) * 32
    found = next((share for most, share in SHARES.items() if num_rows <= most), whole)
    least = -(-whole // (32 * _SPLITS)) * 32
    return whole if is_fixed else min(max(found, least), whole)


def _check(x: Tensor, op_name: str, multiple: int) -> None:
    jit.require(x.element_size() == 2, "{}: {} has no kernels", op_name, x.dtype)
    is_aligned = x.stride(1) == 1 and x.stride(0) % multiple == 0
    is_aligned = is_aligned and x.data_ptr() % (2 * multiple) == 0
    jit.require(is_aligned, "{}: rows are not aligned to {} bytes", op_name, 2 * multiple)


def _turns(num_groups: int, num_ctas: int) -> int:
    """Count the CTAs that share groups, beside which there are `num_ctas` of each."""
    return min(num_groups, max(1, _WAVE // num_ctas))


@shrink.cuda
def _shrink(
    x: Tensor,
    groups: Tensor,
    rows: Tensor,
    place: int,
    width: int,
    norm: RowScale | None = None,
    is_fixed: bool = False,
) -> Tensor:
    _check(x, "shrink", 8)
    num_rows, inputs = x.shape
    jit.require(inputs % 8 == 0, "shrink: {} inputs are no multiple of 8", inputs)
    share = share_of(num_rows, inputs, is_fixed)
    splits = -(-inputs // share)
    partial = torch.empty((splits, num_rows, width), dtype=torch.float32, device=x.device)
    by_turns = min(24, max(2, _CTAS // max(1, len(groups) * splits)))
    weight, eps, plus_one = (0, 0.0, False) if norm is None else norm
    behind = (x, x.stride(0), weight, eps, int(plus_one))
    args = (*behind, groups, len(groups), rows, place, partial, num_rows, width, inputs, share)
    grid = (_turns(len(groups), splits * by_turns), splits, by_turns)
    if len(groups):
        jit.launch(variant_of(x.dtype), "shrink", grid, 256, *args, overlaps=True)
    return partial


@expand.cuda
def _expand(
    y: Tensor, groups: Tensor, rows: Tensor, partial: Tensor, place: int, sizes: Sequence[int]
) -> Tensor:
    _check(y, "expand", 2)
    splits, num_rows, width = partial.shape
    jit.require(refusal(8, sizes) is None, "expand: parts of {} outputs", sizes)
    num_tiles = sum(-(-size // _OUTPUTS) for size in sizes)
    grid = (num_tiles, _turns(len(groups), num_tiles))
    one, two, three = (*sizes, 0, 0)[:PARTS]
    table = groups, len(groups), rows
    args = (y, y.stride(0), *table, place, partial, num_rows, width, splits, one, two, three)
    if len(groups):
        jit.launch(variant_of(y.dtype), "expand", grid, 256, *args, overlaps=True)
    return y
