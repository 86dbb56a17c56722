"""Low-rank terms of the adapters of a step's rows, all of them in two launches a place.

`shrink` makes `t = x A^T` in fp32 and `expand` adds `t B^T` to what the base made, in fp32 and
rounded once; `expand_gated` applies a gate to that. Which rows have which adapter, and where its
matrices lie, is read from the device (`Table`): so a CUDA graph of a step serves every mix of
adapters and ranks, and rows without one.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kernels.elementwise.activation import GATES
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op

TILE = 16  # rows of a group at most; ranks are filled up to a multiple of it
PARTS = 3  # matrices that a place may have stacked
# A term has: where its tiles' addresses are, if B is turned, rank, first column of t, and the
# addresses of the first tiles of A and of B.
WORDS = 6
EXPERT_WORDS = PARTS * WORDS  # from an expert's words of a place to those of the next one
_SHARE, _SPLITS = 512, 8  # inputs of a split at least; splits at most, as `expand.cu` has it
_OUTPUTS = 256  # of a CTA that expands
_OF_TWO, _OF_THREE = 264, 396  # CTAs on a GPU at once, of two and three a multiprocessor


class Table(NamedTuple):
    """The rows of a step, in groups of at most `TILE` of one adapter."""

    # [g, 2] i64: where the adapter's terms are; first of `rows` | count << 32. Behind those of
    # adapters are groups of rows without one, that have no terms, then 0s.
    groups: Tensor
    rows: Tensor  # [n] i32, in the order of groups
    marks: Tensor  # [n] i32: 1: the row has an adapter
    width: int  # of t: the ranks of a place together, at most
    scratch: Tensor | None = None  # of GEMMs that add terms themselves
    # [n] i64: where the terms of experts of each row's adapter are; 0: it has none. None: no row's
    # adapter has any.
    experts: Tensor | None = None


Pair = tuple[Tensor, Tensor]  # A `[r, inputs]` and B `[outputs, r]`
Addresses = Sequence[tuple[int, int]]  # of the tiles of `TILE` ranks of A and of B, on the device


def tiles_of(pair: Pair) -> list[Pair]:
    """Cut a pair into tiles: `[TILE, inputs]` of A, `[outputs, TILE]` of B; the last may be less.

    On the device each tile is filled up by zeros and lies somewhere in one piece.
    """
    a, b = pair
    rank = a.shape[0]
    if rank <= TILE:
        return [pair]
    ranks = [slice(first, first + TILE) for first in range(0, rank, TILE)]
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

    Args:
        places: of each its parts' tiles.
        is_turned: whether tiles of B are turned, as the CPU kernels have them; see `turned`.
    """
    counts = [[0 if tiles is None else len(tiles) for tiles in parts] for parts in places]
    flat = [pair for parts in places for tiles in parts if tiles is not None for pair in tiles]
    return words_of(counts, np.array(flat, np.int64).reshape(-1, 2), is_turned)


def words_of(
    counts: Sequence[Sequence[int]],
    addresses: NDArray[np.int64],
    is_turned: bool,
    experts: Sequence[int] | None = None,
) -> tuple[Tensor, int]:
    """Return what `describe` returns of any number of places.

    The words of all terms come first, `[places, PARTS, WORDS]`, then the addresses of all tiles: a
    term has the index of its first one. Of matrices of experts a group points to the expert's words
    of the first place, so that indices count from there.

    Args:
        counts: tiles of the parts of each place; 0: there is no term.
        addresses: of all tiles' A and B, `[tiles, 2]`, in this order.
        is_turned: as of `describe`.
        experts: of each place the number of the expert; None: it is not of one.
    """
    tiles = np.array([[*parts, 0, 0, 0][:PARTS] for parts in counts], np.int64).reshape(-1, PARTS)
    flat = tiles.reshape(-1)
    first = np.cumsum(flat) - flat
    words = np.zeros((flat.size, WORDS), np.int64)
    shifts = np.zeros(len(tiles), np.int64) if experts is None else np.array(experts, np.int64)
    where = flat.size * WORDS + 2 * first - EXPERT_WORDS * shifts.repeat(PARTS)
    columns = TILE * (np.cumsum(tiles, 1) - tiles).reshape(-1)
    there = flat > 0
    given = (where, np.full_like(flat, int(is_turned)), TILE * flat, columns)
    for column, values in enumerate(given):
        words[there, column] = values[there]
    words[there, 4:] = addresses[first[there]]
    width = TILE * int(tiles.sum(1).max(initial=0))
    return torch.from_numpy(np.concatenate([words.reshape(-1), addresses.reshape(-1)])), width


class ShrinkCall(NamedTuple):
    """Arguments of `shrink`."""

    x: Tensor  # rows that the place multiplies, or that its norm takes
    groups: Tensor  # of a `Table`
    rows: Tensor  # of it, too
    place: int  # its number in tables
    width: int  # columns of t
    norm: RmsNorm | None = None  # of `x`, if it is not computed yet
    is_fixed: bool = False  # may a row's bits not depend on how many rows there are
    factors: Tensor | None = None  # of t, `[n] f32` in the order of `rows`
    are_late: bool = False  # do kernels of the same step make the tables


class ExpandCall(NamedTuple):
    """Arguments of `expand`."""

    y: Tensor  # results of the place
    groups: Tensor  # of a `Table`
    rows: Tensor  # of it, too
    partial: Tensor  # what `shrink` made
    place: int  # its number in tables
    sizes: Sequence[int]  # outputs of each part
    are_late: bool = False  # do kernels of the same step make the tables


@op("x[_,k]:T, groups[_,2]:i64, rows[n]:i32", package=__package__)
@flattened(ShrinkCall)
def shrink(call: ShrinkCall) -> Tensor:
    """Return `t` of the rows that have adapters, `[splits, n, width] f32` in the order of `rows`.

    Its sum over splits is `t`. Rows that no group has are not written.
    """
    x, groups, rows, place, width, norm, _, factors, _ = call
    if norm is not None:
        x = rms_norm(x, *norm)
    found = x.new_zeros((1, len(rows), width), dtype=torch.float32)
    for address, begin, end in _groups(groups):
        of_group = x[rows[begin:end].long()].float()
        for words in _terms(address, place):
            a = torch.cat(
                [_at(at, (TILE, x.shape[1]), x.dtype) for at in _tiles(address, words, 0)]
            )
            here = slice(words[3], words[3] + words[2])
            found[0, begin:end, here] = of_group @ a.float().t()
    return found if factors is None else found * factors[:, None]


@op("y[n,_]:T, groups[_,2]:i64, rows[n]:i32, partial[_,n,_]:f32", package=__package__)
@flattened(ExpandCall)
def expand(call: ExpandCall) -> Tensor:
    """Add terms to `y`, in place: `t B^T` in fp32, then rounded once; return it."""
    y, groups, rows, partial, place, sizes, _ = call
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


@op("y[n,_]:T, groups[_,2]:i64, rows[n]:i32, partial[_,n,_]:f32", package=__package__)
@flattened(ExpandCall)
def expand_new(call: ExpandCall) -> Tensor:
    """Replace rows of `y` that groups have by their terms, rounded once, or zeros; return it.

    Tables may be of the same step.
    """
    for _, begin, end in _groups(call.groups):
        call.y[call.rows[begin:end].long()] = 0
    return expand.oracle(*call)


@op("y[n,_]:T, groups[_,2]:i64, rows[n]:i32, partial[_,n,_]:f32")
def expand_gated(
    y: Tensor,
    groups: Tensor,
    rows: Tensor,
    partial: Tensor,
    place: int,
    sizes: Sequence[int],
    gate: str,
) -> Tensor:
    """Add terms to `y = [gate | up]`, and return it behind a gate: `[n, outputs / 2]`.

    `y` is undefined then.

    Args:
        y, groups, rows, partial, place, sizes: as of `expand`.
        gate: one of `GATES`.
    """
    return GATES[gate](expand(y, groups, rows, partial, place, sizes))


def _groups(groups: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield where the terms of each group are that is not empty, and begin and end of its rows."""
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


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in (torch.float16, torch.bfloat16):
        yield jit.variant("lora/shrink.cu", dtype)
        yield jit.variant("lora/expand.cu", dtype)


def share_of(num_rows: int, inputs: int, is_fixed: bool) -> int:
    """Return the inputs of a split, a multiple of 32: few enough that the splits fill the GPU."""
    blocks = -(-inputs // 32)
    fill = _OF_TWO // -(-num_rows // TILE)
    splits = 1 if is_fixed else max(1, min(_SPLITS, fill, inputs // _SHARE))
    return 32 * -(-blocks // splits)


def _check(x: Tensor, op_name: str, multiple: int) -> None:
    jit.require(x.element_size() == 2, "{}: {} has no kernels", op_name, x.dtype)
    is_aligned = x.stride(1) == 1 and x.stride(0) % multiple == 0
    is_aligned = is_aligned and x.data_ptr() % (2 * multiple) == 0
    jit.require(is_aligned, "{}: rows are not aligned to {} bytes", op_name, 2 * multiple)


def _turns(num_groups: int, most: int, num_ctas: int) -> int:
    """Return how many groups are worked on at once: CTAs take one after another, as most may be
    empty. `num_ctas` work on a group, `most` run at once.
    """
    return min(num_groups, max(1, most // num_ctas))


@shrink.cuda
@flattened(ShrinkCall)
def _shrink(call: ShrinkCall) -> Tensor:
    x, groups, rows, place, width, norm, is_fixed, factors, are_late = call
    if norm is not None:
        x = rms_norm(x, *norm)
    _check(x, "shrink", 8)
    inputs, num_rows = x.shape[1], len(rows)
    jit.require(inputs % 8 == 0, "shrink: {} inputs are no multiple of 8", inputs)
    share = share_of(max(1, num_rows), inputs, is_fixed)
    splits = -(-inputs // share)
    partial = torch.empty((splits, num_rows, width), dtype=torch.float32, device=x.device)
    if len(groups):
        by_turns = max(1, min(8, _OF_TWO // (len(groups) * splits)))
        grid = (_turns(len(groups), _OF_TWO, splits * by_turns), splits, by_turns)
        table = groups, len(groups), rows
        args = (x, x.stride(0), *table, place, partial, num_rows, width, inputs, share)
        late = factors, int(are_late)
        wanted = jit.variant("lora/shrink.cu", x.dtype)
        jit.launch(wanted, "shrink", grid, 256, *args, *late, overlaps=True)
    return partial


@expand.cuda
@flattened(ExpandCall)
def _expand(call: ExpandCall) -> Tensor:
    return _launch_expand("expand", call)


@expand_new.cuda
@flattened(ExpandCall)
def _expand_new(call: ExpandCall) -> Tensor:
    return _launch_expand("expand_new", call._replace(are_late=True))


@expand_gated.cuda
def _expand_gated(
    y: Tensor,
    groups: Tensor,
    rows: Tensor,
    partial: Tensor,
    place: int,
    sizes: Sequence[int],
    gate: str,
) -> Tensor:
    call = ExpandCall(y, groups, rows, partial, place, sizes)
    if len(sizes) != 2 or sizes[0] != sizes[1] or not len(groups):
        return GATES[gate](_launch_expand("expand", call))
    out = torch.empty((len(y), sizes[0]), dtype=y.dtype, device=y.device)
    return _launch_expand(f"expand_{gate}", call, out)


def _launch_expand(entry: str, call: ExpandCall, out: Tensor | None = None) -> Tensor:
    """Launch an entry of `expand.cu`, gated if there is an `out`; return that, or `y`."""
    y, groups, rows, partial, place, sizes, are_late = call
    _check(y, entry, 2)
    splits, num_rows, width = partial.shape
    jit.require(refusal(8, sizes) is None, "{}: parts of {} outputs", entry, sizes)
    jit.require(splits <= _SPLITS, "{}: {} splits, not {} at most", entry, splits, _SPLITS)
    is_gated = out is not None
    is_wide = not any(size % 8 for size in (*sizes, y.stride(0), y.data_ptr() // 2))
    num_tiles = sum(-(-size // _OUTPUTS) for size in (sizes[:1] if is_gated else sizes))
    grid = (num_tiles, _turns(len(groups), _OF_TWO if is_gated else _OF_THREE, num_tiles))
    one, two, three = (*sizes, 0, 0)[:PARTS]
    of_y = y, y.stride(0), out, int(is_wide)
    of_t = partial, num_rows, width, splits
    args = (*of_y, groups, len(groups), rows, place, *of_t, one, two, three, int(are_late))
    if len(groups):
        wanted = jit.variant("lora/expand.cu", y.dtype)
        jit.launch(wanted, entry, grid, 256, *args, overlaps=True)
    return y if out is None else out
