"""Read the part that a rank has of a GGUF file's tensor: rows of whole heads, or whole blocks."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.restore import restore
from slipstream.models.gguf.types import QUANTISED
from slipstream.models.parts import Part, Region, Window


def fill_part(
    entry: TensorEntry, part: Part, read: Callable[[Region], Tensor], out: Tensor
) -> None:
    """Write a part of a tensor that is not stored as its values are.

    `read` gives a region of what is stored.
    """
    window = part.window(units(entry)) or part.all()
    own = within(entry, window)
    stored = read_window(entry, window, read).contiguous()
    values = torch.empty(own.shape, dtype=out.dtype, device=out.device)
    if entry.dtype not in QUANTISED:
        stored = stored.to(torch.float32 if entry.added else out.dtype)
    restore(own, stored, values)
    part.fill(out, values, window)


def units(entry: TensorEntry) -> tuple[int, int]:
    """Return the rows and inputs at whose multiples a window of a GGUF file's tensor can begin."""
    elements = QUANTISED[entry.dtype].elements if entry.dtype in QUANTISED else 1
    return entry.shape[0] // (entry.paired_heads or entry.shape[0]), elements


def read_window(entry: TensorEntry, window: Window, read: Callable[[Region], Tensor]) -> Tensor:
    """Read a window of a tensor, whose rows are bytes if they are of blocks; see `fill_part`."""
    inputs = entry.shape[1:]
    if window.dim == 1 and entry.dtype in QUANTISED:
        kind = QUANTISED[entry.dtype]
        each = [at // kind.elements * kind.num_bytes for at in (window.size, window.total)]
        return window.read((entry.shape[0], each[0]), (entry.shape[0], each[1]), read)
    own = (window.size, *inputs) if window.dim == 0 else (entry.shape[0], window.size)
    return window.read(own, entry.shape, read)


def within(entry: TensorEntry, window: Window) -> TensorEntry:
    """Return the entry of a window."""
    rows, rest = entry.shape[0], entry.shape[1:]
    if window.dim == 1:
        return replace(entry, shape=(rows, window.size))
    heads = entry.paired_heads * window.size // rows
    return replace(entry, shape=(window.size, *rest), paired_heads=heads)
