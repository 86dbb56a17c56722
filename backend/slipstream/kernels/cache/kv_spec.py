"""The size and layout of the KV cache: one description for memory, allocation and transfers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.cache import kv_format
from slipstream.kernels.runtime.zeroed import zeroed


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Layout of keys and values in the blocks of the cache.

    A block of the pool holds `block_size` tokens of each of `num_layers` layers. A layer's cache is
    `[block, kv head, K or V, token in block, row]`, a row being a head's numbers, or in fewer bits
    its bytes and their scales (kv_format.py).
    """

    dtype: torch.dtype  # of an element; names the format
    num_kv_heads: int
    head_size: int
    block_size: int  # tokens
    num_layers: int  # of a group: the layers that share a block

    @property
    def format_name(self) -> str:
        """Return the format as `kv_cache_dtype` names it; of unquantised numbers, their dtype."""
        return kv_format.name_of(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's K, or V, of one token; scales included."""
        return kv_format.row_size(self.dtype, self.head_size) * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row that are scales; 0 where numbers are not quantised."""
        return kv_format.num_scales(self.dtype, self.head_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers that share it."""
        return self.num_layers * self.block_size * self.token_bytes

    def layer_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Return the shape of one layer's cache, in elements of `dtype`."""
        row = kv_format.row_size(self.dtype, self.head_size)
        return num_blocks, self.num_kv_heads, 2, self.block_size, row

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Return the cache of all layers, `[layer, *layer_shape]`, zeroed.

        Zeros, since padding may be multiplied by 0 and must be finite for that.
        """
        shape = (self.num_layers, *self.layer_shape(num_blocks))
        return zeroed(shape, self.dtype, device)
