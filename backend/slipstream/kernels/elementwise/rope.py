"""Rotary embedding (Su et al., 2021; Llama's halves) and the write to the paged cache in one."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.cache import kv_format
from slipstream.kernels.elementwise.scales import Scales, scaled
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

THREADS = 128


class HeadStages(NamedTuple):
    """Stages of heads around their rotation, and scales of the cache."""

    scales: Scales | None = None  # which a product `[q | k | v]` still lacks; all is bf16 then
    q_norm: Tensor | None = None  # [d]: of every head of q, as `rms_norm` (Qwen3); with k_norm
    k_norm: Tensor | None = None
    eps: float = 0.0
    static: kv_format.Static | None = None  # an fp8 cache's scales, instead of each token's own
    are_late: bool = False  # norms come behind the rotation, which leaves the head's mean square
    factors: Tensor | None = None  # [positions] f32: of rotated q; norms, if any, are late then


PLAIN = HeadStages()


def _turned(x: Tensor, norm: Tensor | None, stages: HeadStages, cos: Tensor, sin: Tensor) -> Tensor:
    """Each head, with its RMS norm if there is one, rotated; fp32."""
    x32 = x.float()
    if norm is None:
        return rotate(x32, cos, sin)
    scaled = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + stages.eps)
    if stages.are_late:
        return rotate(scaled, cos, sin) * norm.float()
    return rotate(scaled * norm.float(), cos, sin)


def _scaled(qkv: tuple[Tensor, ...], scales: Scales) -> list[Tensor]:
    """Each head's numbers times their scales, rounded as a product of 16 bits would be."""
    flat = torch.cat([x.flatten(1) for x in qkv], dim=1)
    values = scaled(flat, *scales).to(flat.dtype)
    parts = torch.split(values, [x[0].numel() for x in qkv], dim=1)
    return [part.view(x.shape) for part, x in zip(parts, qkv, strict=True)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [n, heads, d]`, each pair (i, i + d / 2) by the angle of these, `[n, 1, d / 2]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@op(
    "q[n,hq,d]:T, k[n,h,d]:T, v[n,h,d]:T, cos_sin[_,d]:f32, positions[n]:i64, slots[n]:i64, "
    "cache[_,_,2,_,_]:any",
    package=__package__,
)
def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    stages: HeadStages = PLAIN,
) -> None:
    """Rotate `q` in place; write rotated `k`, and `v`, into `cache` at `slots`.

    `stages` come before, in their order: scales, then norms; late norms, and factors, behind it.

    `cos_sin[p]` holds d/2 cosines, then d/2 sines, of position p. `cache` is
    `[block, kv head, K or V, token in block, row]` (kv_format.py); slot s is token `s % block_size`
    of block `s // block_size`; a negative slot writes nothing. With blocks of one kv head each,
    head h of block b is in block `b * kv heads + h`. Rows of q, k, v may be strided
    (views of one qkv matrix); heads and elements within a row are contiguous.
    """
    scales, static = stages.scales, stages.static
    _check_cache(cache, k, static)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    out = q
    if scales is not None and len(q) > 0:
        q, k, v = _scaled((q, k, v), scales)
    turned = _turned(q, stages.q_norm, stages, cos, sin)
    if stages.factors is not None:
        turned = turned * stages.factors[positions, None, None]
    out.copy_(turned)
    keep = slots >= 0
    rotated = _turned(k, stages.k_norm, stages, cos, sin).to(k.dtype)
    kv_format.write(cache, slots[keep], rotated[keep], v[keep], static)


def _check_cache(cache: Tensor, k: Tensor, static: kv_format.Static | None) -> None:
    kv_format.check_cache("rope_and_cache", cache, k, static)
    heads, own = k.shape[1], cache.shape[1]
    jit.require(own in (1, heads), "rope_and_cache: blocks of {} kv heads, not {}", own, heads)


def _variant(
    dtype: torch.dtype,
    head_size: int,
    vector: int,
    cached: torch.dtype | None = None,
    is_late: bool = False,
) -> jit.Variant:
    macros = kv_format.macros(cached or dtype) | ({"LATE": 1} if is_late else {})
    return jit.variant("elementwise/rope.cu", dtype, HEAD_SIZE=head_size, VECTOR=vector, **macros)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in jit.DTYPES:
        for head_size in jit.HEAD_SIZES:
            for vector in (1, 16 // dtype.itemsize):
                yield _variant(dtype, head_size, vector)
                yield _variant(dtype, head_size, vector, is_late=True)
            for cached in kv_format.FORMATS.values():
                yield _variant(dtype, head_size, 16 // dtype.itemsize, cached)
                yield _variant(dtype, head_size, 16 // dtype.itemsize, cached, is_late=True)


def _check_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Raise `KernelError` unless layouts are as the kernel assumes beyond the signature."""
    head_size = jit.head_size_of(q.dtype, q.shape[2])
    jit.block_shift(cache.shape[3])
    is_whole = not kv_format.is_quantized(cache) or (
        cache.shape[3] >= kv_format.MIN_BLOCK_SIZE and cache.data_ptr() % 16 == 0
    )
    jit.require(is_whole, "rope_and_cache: blocks of {} must be whole vectors", cache.dtype)
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_row = x.stride(2) == 1 and (x.stride(1) == head_size or x.shape[1] == 1)
        jit.require(is_row, "rope_and_cache: heads of a row of {} must be contiguous", name)
    for name, x in (
        ("cos_sin", cos_sin),
        ("cache", cache),
        ("positions", positions),
        ("slots", slots),
    ):
        jit.require(x.is_contiguous(), "rope_and_cache: {} must be contiguous", name)


def _checked_norms(q: Tensor, stages: HeadStages) -> list[Tensor]:
    """Return the norms; raises `KernelError` for stages that the kernel does not have."""
    norms = [norm for norm in (stages.q_norm, stages.k_norm) if norm is not None]
    jit.require(len(norms) != 1, "rope_and_cache: norms of both q and k, or none")
    jit.require(
        all(norm.shape == (q.shape[2],) and norm.dtype == q.dtype for norm in norms),
        "rope_and_cache: norms must be [{}] {}",
        q.shape[2],
        q.dtype,
    )
    factors = stages.factors
    if factors is not None:
        is_table = factors.dtype == torch.float32 and factors.ndim == 1 and factors.is_contiguous()
        jit.require(is_table, "rope_and_cache: factors must be [positions] f32, contiguous")
        jit.require(stages.are_late or not norms, "rope_and_cache: factors go with late norms")
    return norms


@rope_and_cache.cuda
def _rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    stages: HeadStages = PLAIN,
) -> None:
    num_tokens, num_q_heads, head_size = q.shape
    _check_layout(q, k, v, cos_sin, positions, slots, cache)
    scales, static = stages.scales, stages.static
    _check_cache(cache, k, static)
    norms = _checked_norms(q, stages)
    is_late = stages.are_late or stages.factors is not None
    if num_tokens == 0:
        return
    rows = (q.flatten(1), k.flatten(1), v.flatten(1))
    is_quantized = kv_format.is_quantized(cache)
    vector = jit.vector_width(head_size // 2, *rows, *([] if is_quantized else [cache]), *norms)
    jit.require(vector > 1 or not is_quantized, "rope_and_cache: rows must be aligned to 16 bytes")
    jit.require(
        scales is None or q.dtype == torch.bfloat16, "rope_and_cache: scales of a bf16 product only"
    )
    strided = [arg for x in rows for arg in (x, x.stride(0))]
    lanes = next(n for n in (4, 8, 16, 32) if n >= min(head_size // 2 // vector, 32))
    num_heads = num_q_heads + 2 * k.shape[1]
    late = (stages.factors,) if is_late else ()
    jit.launch(
        _variant(q.dtype, head_size, vector, cache.dtype, is_late),
        "rope_and_cache",
        (num_tokens, -(-num_heads * lanes // THREADS)),
        THREADS,
        *strided,
        cos_sin,
        positions,
        slots,
        cache,
        num_q_heads,
        k.shape[1],
        jit.block_shift(cache.shape[3]),
        *(norms or (None, None)),
        stages.eps,
        *(scales or (None, None, None)),
        *(static or (0.0, 0.0)),
        *((cache.shape[1],) if is_quantized else ()),
        *late,
        overlaps=True,
    )
