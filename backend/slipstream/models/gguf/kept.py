"""Keep the blocks of GGUF's types that are a scale and codes: Q4_0 and Q8_0, by 32 inputs.

A block is an fp16, the scale, then its codes: of Q4_0 16 bytes, whose lower halves are the first 16
of them and whose upper halves the others, with a zero of 8; of Q8_0 32 signed bytes.
"""

import torch
from torch import Tensor

from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.restore import rows_in_order
from slipstream.models.gguf.types import QUANTISED
from slipstream.quant.matrix import Kind, QuantMatrix, halves

KEPT = ("Q4_0", "Q8_0")


def kept(entry: TensorEntry, blocks: Tensor) -> QuantMatrix:
    """Return a matrix of a type in `KEPT`, rows in the order of a Hugging Face checkpoint.

    Args:
        entry: the matrix.
        blocks: its bytes, u8.
    """
    kind, (rows, inputs) = QUANTISED[entry.dtype], entry.shape
    each = rows_in_order(entry, blocks).reshape(rows, -1, kind.num_bytes)
    scales = each[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = each[..., 2:]
    if entry.dtype == "Q8_0":
        eight = codes.reshape(rows, inputs).view(torch.int8)
        return QuantMatrix(Kind.W8, eight, scales, kind.elements, inputs)
    four = torch.cat([codes & 15, codes >> 4], -1).view(rows, inputs)
    return QuantMatrix(Kind.W4, halves(four), scales, kind.elements, inputs)
