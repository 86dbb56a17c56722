"""Keep the blocks of GGUF's types that are scales and codes: Q4_0, Q4_1 and Q8_0, by 32 inputs.

A block is an fp16, the scale, of Q4_1 another, the minimum, then its codes: of Q4_0 and Q4_1 16
bytes, whose lower halves are the first 16 of them and whose upper halves the others, with a zero of
8 in Q4_0; of Q8_0 32 signed bytes.
"""

import torch
from torch import Tensor

from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.restore import rows_in_order
from slipstream.models.gguf.types import QUANTISED
from slipstream.quant.matrix import Kind, QuantMatrix, halves

KEPT = ("Q4_0", "Q4_1", "Q8_0")


def kept(entry: TensorEntry, blocks: Tensor) -> QuantMatrix:
    """Return a matrix of a type in `KEPT`, rows in the order of a Hugging Face checkpoint.

    Args:
        entry: the matrix.
        blocks: its bytes, u8.
    """
    kind, (rows, inputs) = QUANTISED[entry.dtype], entry.shape
    each = rows_in_order(entry, blocks).reshape(rows, -1, kind.num_bytes)
    scales = each[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = each[..., 4 if entry.dtype == "Q4_1" else 2 :]
    if entry.dtype == "Q8_0":
        eight = codes.reshape(rows, inputs).view(torch.int8)
        return QuantMatrix(Kind.W8, eight, scales, kind.elements, inputs)
    four = halves(torch.cat([codes & 15, codes >> 4], -1).view(rows, inputs))
    if entry.dtype == "Q4_0":
        return QuantMatrix(Kind.W4, four, scales, kind.elements, inputs)
    minimums = each[..., 2:4].contiguous().view(torch.float16).squeeze(-1)
    zeros = torch.zeros_like(scales, dtype=torch.uint8)
    return QuantMatrix(Kind.W4, four, scales, kind.elements, inputs, zeros, minimums)
