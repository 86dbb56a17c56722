"""The newest token of each sequence of a step of decodes, on its way to the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise.rope import rope_and_cache
from slipstream.kernels.runtime import jit


class Newest(NamedTuple):
    """The newest tokens, as `rope_and_cache` takes them."""

    k: Tensor  # [s, h, d]
    v: Tensor  # [s, h, d]
    cos_sin: Tensor  # [positions, d] f32; where sequences stream [s, d], of each its own


def rotate_and_cache(
    q: Tensor,
    newest: Newest,
    cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    streams: bool = False,
) -> Tensor:
    """Return the rotated `q [s, hq, d]`; write `newest` into `cache`."""
    places = (lengths.long() - 1).clamp(min=0)
    block_size = cache.shape[3]
    blocks = block_tables.long().gather(1, (places // block_size)[:, None])[:, 0]
    slots = torch.where(lengths > 0, blocks * block_size + places % block_size, -1)
    rows = torch.arange(len(q), device=q.device) if streams else places
    q = q.clone()
    rope_and_cache.oracle(q, newest.k, newest.v, newest.cos_sin, rows, slots, cache)
    return q


def check_newest(op_name: str, q: Tensor, cache: Tensor, newest: Newest) -> None:
    """Raise `KernelError` unless `newest` is as the kernel assumes."""
    num_rows, _, head_size = q.shape
    for name, x in (("k", newest.k), ("v", newest.v)):
        is_like_q = x.shape == (num_rows, cache.shape[1], head_size) and x.dtype == q.dtype
        jit.require(is_like_q, "{}: {} does not fit q and cache", op_name, name)
        is_row = x.stride(2) == 1 and (x.stride(1) == head_size or x.shape[1] == 1)
        jit.require(is_row, "{}: heads of a row of {} must be contiguous", op_name, name)
        is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
        jit.require(is_aligned, "{}: rows of {} must be aligned to 16 bytes", op_name, name)
    table = newest.cos_sin
    is_table = table.dtype == torch.float32 and table.shape[1] == head_size
    jit.require(is_table and table.is_contiguous(), "{}: cos_sin is no fp32 table", op_name)
