"""Rotation and cache writes on the processor, by the kernels in C++."""

import torch
from torch import Tensor

from slipstream.kernels.cache import kv_format
from slipstream.kernels.cpu.native import Cache, Rotation, address, library, loaded, num_threads
from slipstream.kernels.elementwise.rope import PLAIN, HeadStages, rope_and_cache

# `enum Format`.
_FORMATS = {torch.float32: 0, torch.float8_e4m3fn: 1, torch.int8: 2, torch.uint8: 3}


def cache_struct(cache: Tensor) -> Cache:
    """Return what the kernels know of a layer's cache, which must be contiguous."""
    heads, block_size = cache.shape[1], cache.shape[3]
    size = kv_format.head_size_of(cache)
    return Cache(cache.data_ptr(), _FORMATS[cache.dtype], heads, block_size, size)


def takes_heads(traits: tuple[object, ...]) -> str | None:
    """Say why the kernels do not take rows of heads of this shape and dtype; None: they do."""
    shape, dtype, *_ = traits
    if dtype != torch.float32:
        return "takes heads of fp32"
    if not isinstance(shape, torch.Size) or shape[-1] % 2:
        return "takes heads of an even size"
    return "is not built" if library() is None else None


def _takes(spec: tuple[tuple[object, ...], ...]) -> str | None:
    return takes_heads(spec[0])


@rope_and_cache.implementation("C++", "cpu", takes=_takes, cost=0.5)
def rotate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    stages: HeadStages = PLAIN,
) -> None:
    """`rope_and_cache`; what the kernel does not take is computed by torch."""
    size, pitch = q.shape[2], q.stride(0)
    rows = (q, k, v)
    are_rows = all(x.stride()[1:] == (size, 1) for x in rows)
    are_rows = are_rows and (len(q) < 2 or all(x.stride(0) == pitch for x in rows))
    tables = (
        cos_sin,
        positions,
        slots,
        cache,
        *([] if stages.factors is None else [stages.factors]),
    )
    is_dense = all(x.is_contiguous() for x in tables) and cache.shape[1] == k.shape[1]
    if stages.scales is not None or stages.static is not None or not (are_rows and is_dense):
        rope_and_cache.oracle(q, k, v, cos_sin, positions, slots, cache, stages)
        return
    kv_format.check_cache("rope_and_cache", cache, k)
    norms = address(stages.q_norm), address(stages.k_norm)
    where = positions.data_ptr(), slots.data_ptr()
    factors = address(stages.factors)
    how = Rotation(cos_sin.data_ptr(), *norms, factors, *where, stages.eps, stages.are_late)
    of = (x.data_ptr() for x in rows)
    sizes = pitch, len(q), q.shape[1], num_threads()
    loaded().rotate(how, cache_struct(cache), *of, *sizes)
