"""Rotary embedding (Su et al., 2021; the halves convention of Llama) and the write into the paged cache, in one pass."""

import torch
from torch import Tensor

from slipstream.kernels.op import op


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@op("q[n,hq,d]:T, k[n,h,d]:T, v[n,h,d]:T, cos_sin[_,d]:f32, positions[n]:i64, slots[n]:i64, cache[_,h,2,_,d]:T")
def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    """Rotate `q` in place; write rotated `k`, and `v`, into `cache` at `slots`.

    `cos_sin[p]` holds d/2 cosines, then d/2 sines, of position p. `cache` is
    `[block, kv head, K or V, token in block, d]`; slot s is token `s % block_size` of block
    `s // block_size`; a negative slot writes nothing. Rows of q, k, v may be strided (views of one
    qkv matrix); heads and elements within a row are contiguous.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    q.copy_(_rotate(q, cos, sin))
    keep = slots >= 0
    block, offset = slots[keep] // cache.shape[3], slots[keep] % cache.shape[3]
    cache[block, :, 0, offset] = _rotate(k, cos, sin)[keep]
    cache[block, :, 1, offset] = v[keep]
