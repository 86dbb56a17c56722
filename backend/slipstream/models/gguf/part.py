"""Read the part that a rank has of a GGUF file's tensor: rows of whole heads, or whole blocks."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.models.cuts import Cut, MatrixCut
from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.restore import restore
from slipstream.models.gguf.types import QUANTISED
from slipstream.models.parts import Window, window_of


def fill_part(
    entry: TensorEntry, cut: Cut, read: Callable[[tuple[slice, ...]], Tensor], out: Tensor
) -> None:
    """Write a part of a tensor that is not stored as its values are.

    `read` gives a region of what is stored.
    """
    window = window_of(MatrixCut.of(cut), units(entry)) or Window(cut.dim, 0, cut.total, cut.total)
    own = within(entry, window)
    stored = read(region_of(entry, window)).contiguous()
    values = torch.empty(own.shape, dtype=out.dtype, device=out.device)
    if entry.dtype not in QUANTISED:
        stored = stored.to(torch.float32 if entry.added else out.dtype)
    restore(own, stored, values)
    begin, count = cut.stored
    cut.fill(out, values.narrow(cut.dim, begin - window.begin if count else 0, count))


def units(entry: TensorEntry) -> tuple[int, int]:
    """Return the rows and inputs at whose multiples a window of a GGUF file's tensor can begin."""
    elements = QUANTISED[entry.dtype].elements if entry.dtype in QUANTISED else 1
    return entry.shape[0] // (entry.paired_heads or entry.shape[0]), elements


def region_of(entry: TensorEntry, window: Window) -> tuple[slice, ...]:
    """Return where a window lies in a tensor, whose rows are bytes if they are of blocks."""
    first, last = window.begin, window.end
    if window.dim == 0:
        return (slice(first, last),)
    if entry.dtype in QUANTISED:
        kind = QUANTISED[entry.dtype]
        first, last = (at // kind.elements * kind.num_bytes for at in (first, last))
    return slice(None), slice(first, last)


def within(entry: TensorEntry, window: Window) -> TensorEntry:
    """Return the entry of a window."""
    rows, rest = entry.shape[0], entry.shape[1:]
    if window.dim == 1:
        return replace(entry, shape=(rows, window.size))
    heads = entry.paired_heads * window.size // rows
    return replace(entry, shape=(window.size, *rest), paired_heads=heads)
