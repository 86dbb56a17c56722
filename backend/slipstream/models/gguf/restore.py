"""Turn what a file stores of a tensor into its values: order of rows, blocks, what was added.

The two steps are apart so that a scheme of weights can keep the blocks: `rows_in_order` gives a
matrix as raw blocks of `entry.dtype`, row by row, and `dequantise` makes values of blocks.
"""

import torch
from torch import Tensor

from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.blocks import dequantise
from slipstream.models.gguf.types import QUANTISED


def buffer_for(entry: TensorEntry, out: Tensor) -> Tensor:
    """Return the tensor into which the stored elements are read: `out`, or one on its device."""
    if entry.dtype in QUANTISED:
        return torch.empty(entry.end - entry.begin, dtype=torch.uint8, device=out.device)
    return torch.empty_like(out, dtype=torch.float32) if entry.added else out


def restore(entry: TensorEntry, buffer: Tensor, out: Tensor) -> None:
    """Write the values of the stored elements in `buffer` into `out`."""
    rows = rows_in_order(entry, buffer)
    kind = QUANTISED.get(entry.dtype)
    if kind is not None:
        dequantise(rows.view(-1, kind.num_bytes), kind, out)
        if entry.added:
            out.sub_(entry.added)
    elif entry.added:
        out.copy_(buffer - entry.added)
    elif entry.paired_heads:
        out.copy_(rows.view_as(out))


def rows_in_order(entry: TensorEntry, buffer: Tensor) -> Tensor:
    """Return the rows, `[n, elements or bytes]`, in the order of a Hugging Face checkpoint.

    There the values that rotate together are half a head apart, here they may be neighbours.
    """
    rows = buffer.view(entry.shape[0] if entry.shape else 1, -1)
    if not entry.paired_heads:
        return rows
    pairs = rows.view(entry.paired_heads, -1, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)
