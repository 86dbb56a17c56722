"""Rows of a matrix in GGUF's blocks, which become numbers when they are looked up."""

import torch
from torch import Tensor

from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.blocks import dequantise, powers
from slipstream.models.gguf.types import QUANTISED

_SCALES_AT = {"Q3_K": 108, "Q6_K": 208}  # bytes in front of a block's scale; of other types none


class BlockRows:
    """A matrix that stays as the file has it; values are those of `restore`, bit for bit.

    Args:
        entry: the matrix, its rows in the order of a Hugging Face checkpoint.
        blocks: its bytes, `[rows, n] u8`.
        dtype: of the rows.
    """

    def __init__(self, entry: TensorEntry, blocks: Tensor, dtype: torch.dtype) -> None:
        assert not entry.paired_heads
        assert not entry.added
        self._blocks, self._kind, self.dtype = blocks, QUANTISED[entry.dtype], dtype
        self.shape = (entry.shape[0], entry.shape[1])

    @property
    def scales(self) -> Tensor:
        """The scale of each block, fp16, `[rows, blocks]`; of MXFP4 fp32."""
        each = self._blocks.view(self.shape[0], -1, self._kind.num_bytes)
        if self._kind.name == "MXFP4":
            return powers(each.flatten(0, 1)).view(self.shape[0], -1)
        at = _SCALES_AT.get(self._kind.name, 0)
        return each[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)

    def __call__(self, ids: Tensor) -> Tensor:
        """Dequantise some rows: `[n] i64 -> [n, inputs]`."""
        return self._values(self._blocks[ids])

    def whole(self) -> Tensor:
        """Dequantise all rows."""
        return self._values(self._blocks)

    def _values(self, blocks: Tensor) -> Tensor:
        out = torch.empty(len(blocks), self.shape[1], dtype=self.dtype, device=blocks.device)
        if not blocks.is_meta:
            dequantise(blocks.view(-1, self._kind.num_bytes), self._kind, out)
        return out
