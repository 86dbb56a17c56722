"""Rows of a cache of latents (attention/latent.py), and the parts of queries that rotate."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.cache import kv_format
from slipstream.kernels.elementwise.rope import rotate
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op

_THREADS = 256


class LatentRows(NamedTuple):
    """Arguments of `latent_rows`."""

    x: Tensor  # [n, row]: latents, not yet normalised, and keys, not yet rotated
    weight: Tensor  # [latent], of the norm
    cos_sin: Tensor  # [positions, rotated] f32
    positions: Tensor  # [n] i64, into cos_sin
    slots: Tensor  # [n] i64; a negative one writes nothing
    cache: Tensor  # [block, 1, first or second half, token in block, row / 2]
    q: Tensor  # [n, hq, plain + rotated]
    out: Tensor  # [n, hq, row]: whose last numbers are written
    eps: float
    interleaved: bool  # pairs lie side by side; in the cache they are half of `rotated` apart


def _turned(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    if interleaved:
        x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return rotate(x, *angles).to(x.dtype)


@op(
    "x[n,row]:T, weight[_]:T, cos_sin[_,r]:f32, positions[n]:i64, slots[n]:i64, "
    "cache[_,_,2,_,_]:any, q[n,hq,_]:T, out[n,hq,row]:T"
)
@flattened(LatentRows)
def latent_rows(call: LatentRows) -> None:
    """Write normalised latents and rotated keys to the cache, rotated queries to `out`."""
    x, weight, cos_sin, positions, slots, cache, q, out, eps, interleaved = call
    rank, rotated = len(weight), cos_sin.shape[1]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    latent = x[:, :rank].float()
    latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    key = _turned(x[:, None, rank:], (cos, sin), interleaved)
    row = torch.cat((latent[:, None].to(x.dtype), key), -1)
    keep = slots >= 0
    first, last = row[keep].chunk(2, -1)
    kv_format.write(cache, slots[keep], first, last)
    out[..., rank:] = _turned(q[..., q.shape[2] - rotated :], (cos, sin), interleaved)


def _variant(dtype: torch.dtype) -> jit.Variant:
    return jit.variant("attention/latent_rows.cu", dtype)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from map(_variant, jit.DTYPES)


@latent_rows.cuda
@flattened(LatentRows)
def _latent_rows(call: LatentRows) -> None:
    x, weight, cos_sin, positions, slots, cache, q, out, eps, interleaved = call
    row, rank, rotated = x.shape[1], len(weight), cos_sin.shape[1]
    is_row = row == rank + rotated == 2 * cache.shape[4] and cache.shape[1] == 1
    jit.require(is_row, "latent_rows: rows of {} are not of {} and {}", row, rank, rotated)
    jit.require(cache.dtype == x.dtype, "latent_rows: a cache of {} for {}", cache.dtype, x.dtype)
    tensors = (weight, cos_sin, positions, slots, cache, q, out)
    are_whole = all(each.is_contiguous() for each in tensors) and x.stride(1) == 1
    jit.require(are_whole, "latent_rows: tensors must be contiguous, x in its rows")
    if len(x) == 0:
        return
    jit.launch(
        _variant(x.dtype),
        "latent_rows",
        (len(x),),
        _THREADS,
        x,
        x.stride(0),
        weight,
        eps,
        cos_sin,
        positions,
        slots,
        cache,
        q,
        out,
        rank,
        rotated // 2,
        q.shape[2] - rotated,
        q.shape[1],
        jit.block_shift(cache.shape[3]),
        int(interleaved),
    )
