"""GEMMs of one or two rows, as fast as the matrix can be read (sm_90).

The stages around a product in a block are fused: the norm of its input, bias, scales of 8-bit
weights, `silu(gate) * up` or an activation of every column, the residual sum.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from slipstream.kernels.elementwise.activation import EVERY, GATES
from slipstream.kernels.elementwise.eight_bits import E4M3, INT8, PRODUCTS
from slipstream.kernels.gemm.op import (
    PLAIN,
    Around,
    Spec,
    TermTable,
    adapted_gemm,
    gemm,
    width_of,
)
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import Implementation

MAX_ROWS = 2
DTYPES = (torch.float16, torch.bfloat16)
THREADS = 256  # that multiply
PIECE = 8  # weights that a thread takes at once
CHUNKS = (1, 2, 4, 7, 14)
MAX_CHUNKS = {1: 14, 2: 7}  # by rows: what registers can hold of x
MAX_SLOTS = 16
SLOT_BYTES = 32 << 10
# Dynamic shared memory of a CTA when so many fill a multiprocessor: at most and at least. One more
# must not fit: CTAs of a kernel that starts late would crowd on the multiprocessors free first.
RING_BYTES = {1: 200 << 10, 2: 104 << 10}
MIN_BYTES = {1: 110 << 10, 2: 78 << 10}
# Activations of every column, as gemv.cu counts them.
ACTIVATIONS = {EVERY + name: n for n, name in enumerate(("gelu", "gelu, by tanh", "relu"), 1)}


@dataclass(frozen=True, slots=True)
class GemvTiling:
    """Tiles in which a matrix streams through the shared memory of its CTAs."""

    rows: int  # of x
    chunks: int  # pieces of a weight row for each thread
    group: int  # weight rows multiplied at once
    slot_rows: int
    num_slots: int
    ctas: int = 1  # of a multiprocessor
    is_centred: bool = False  # the norm is a layer norm

    @property
    def is_packed(self) -> bool:
        """Whether registers hold x in 16 bits; it is not normalised then (PACKED in gemv.cu)."""
        return self.chunks > 7

    def bytes(self, row_bytes: int) -> int:
        """Return bytes of dynamic shared memory; no less than keeps another CTA out."""
        return max(self.num_slots * self.slot_rows * row_bytes, MIN_BYTES[self.ctas])


@functools.cache
def tiling(
    num_rows: int,
    width: int,
    row_bytes: int,
    gated: bool,
    is_centred: bool = False,
    has_terms: bool = False,
) -> GemvTiling | None:
    """For `num_rows` rows of x and weight rows of `width` elements; None where it does not fit."""
    chunks = next((c for c in CHUNKS if c * THREADS * PIECE >= width), None)
    if chunks is None or chunks > (
        4 if num_rows == 2 and (is_centred or has_terms) else MAX_CHUNKS[num_rows]
    ):
        return None
    is_small = row_bytes == width
    group = 4 if chunks <= 2 else 2 if is_small and (num_rows, chunks) == (1, 7) else 1
    step = max(group, 2 if gated else 1)
    # Measured: for one row, two CTAs a multiprocessor win 1 % wherever their rings are deep enough.
    # A layer norm of many inputs, and terms of adapters to them, have no registers for that.
    in_pairs = num_rows == 1 and chunks in ((2,) if is_small or is_centred or has_terms else (2, 7))
    for ctas in (2, 1) if in_pairs else (1,):
        slot_bytes = SLOT_BYTES // (2 if is_small and ctas == 2 else 1)
        slot_rows = min(max(slot_bytes // row_bytes // step * step, step), THREADS // num_rows)
        num_slots = min(RING_BYTES[ctas] // (slot_rows * row_bytes), MAX_SLOTS)
        if num_slots > ctas:
            return GemvTiling(num_rows, chunks, group, slot_rows, num_slots, ctas, is_centred)
    return None


def refusal(spec: Spec) -> str | None:
    """Say why the kernel is not built for a product; None: it is."""
    row_bytes = spec.inputs * spec.weight.itemsize
    if not 1 <= spec.rows <= MAX_ROWS:
        return f"takes 1 to {MAX_ROWS} rows"
    if spec.x not in DTYPES or spec.weight not in (spec.x, *PRODUCTS):
        return "takes 16-bit rows, and weights of their type or of 8 bits"
    if (spec.weight in PRODUCTS) != (spec.scales == "columns") or spec.scales == "both":
        return "scales weights of 8 bits, by column"
    if spec.norm == "norm plus one":
        return "has no norms plus one"
    is_gated = spec.gate in GATES
    if spec.gate not in ("", "silu", *ACTIVATIONS):
        return "gates by SiLU, and activates by GELU and ReLU alone"
    if spec.inputs % PIECE or row_bytes % 16 or spec.outputs % (2 if is_gated else 1):
        return f"takes multiples of {PIECE} inputs whose weights are multiples of 16 bytes"
    if not (spec.x_aligned and spec.weight_aligned and spec.norm_aligned):
        return "takes what is aligned to 16 bytes"
    if spec.rows > 1 and not spec.x_pitch:
        return "takes rows that are aligned to 16 bytes"
    tiles = tiling(spec.rows, spec.inputs, row_bytes, is_gated, spec.norm == "layer norm")
    if tiles is None or (spec.norm and tiles.is_packed):
        return "finds no registers for so many inputs"
    return None


def takes(spec: Spec) -> str | None:
    """Say why another is better; None: this is the fastest."""
    if spec.gate in GATES and not spec.norm:
        return "gates where it also computes the norm"
    return refusal(spec)


def cost(spec: Spec) -> float:
    """Return the cost, in kernels: by weights of 8 bits the skinny GEMM is faster with two rows."""
    return 2.5 if spec.weight in PRODUCTS and spec.rows > 1 else 0.0


def adapts(spec: Spec) -> str | None:
    """Say why the kernel does not take terms of adapters beside a product; None: it does."""
    if spec.norm == "layer norm" or spec.gate in ACTIVATIONS:
        return "takes terms of adapters behind RMS norms, and before SiLU alone"
    row_bytes = spec.inputs * spec.weight.itemsize
    if (why := refusal(spec)) is not None:
        return why
    if tiling(spec.rows, spec.inputs, row_bytes, spec.gate in GATES, has_terms=True) is None:
        return "finds no registers for terms of adapters to so many inputs"
    return None


def _variant(
    dtype: torch.dtype,
    weight: torch.dtype,
    tiles: GemvTiling,
    gate: str = "",
    has_terms: bool = False,
) -> jit.Variant:
    sizes = {"ROWS": tiles.rows, "CHUNKS": tiles.chunks, "GROUP": tiles.group, "CTAS": tiles.ctas}
    more = {"INT8": 1} if weight == INT8 else {}
    if tiles.is_centred:
        more["CENTRES"] = 1
    if gate in ACTIVATIONS:
        more["ACTIVATES"] = ACTIVATIONS[gate]
    if has_terms:
        more["ADAPTS"] = 1
    return jit.variant("gemm/sm90/gemv.cu", dtype, FP8=int(weight == E4M3), **sizes, **more)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    found: dict[jit.Variant, None] = {}
    kinds = [(dtype, weight) for dtype in DTYPES for weight in (*PRODUCTS, dtype)]
    for (dtype, weight), rows, chunks, gate, is_centred in product(
        kinds, MAX_CHUNKS, CHUNKS, ("", "silu", *ACTIVATIONS), (False, True)
    ):
        width = chunks * THREADS * PIECE
        row_bytes = width * weight.itemsize
        tiles = tiling(rows, width, row_bytes, gate in GATES, is_centred)
        if tiles is not None and not (is_centred and tiles.is_packed):
            found[_variant(dtype, weight, tiles, gate)] = None
        if not is_centred and gate not in ACTIVATIONS:
            tiles = tiling(rows, width, row_bytes, gate in GATES, has_terms=True)
            if tiles is not None:
                found[_variant(dtype, weight, tiles, gate, has_terms=True)] = None
    yield from found


@gemm.implementation("gemv", "cuda", "sm_90a", takes=takes, cost=cost)
def gemv(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, everything in one kernel."""
    num_rows, width = x.shape
    is_centred = around.norm_kind == "layer norm"
    row_bytes = width * weight.itemsize
    tiles = tiling(num_rows, width, row_bytes, around.gate in GATES, is_centred)
    jit.require(
        tiles is not None, "gemv: no kernel for {} and {} {}", x.shape, weight.shape, weight.dtype
    )
    assert tiles is not None
    return launch(tiles, x, weight, around)


def adapted(x: Tensor, weight: Tensor, around: Around, terms: TermTable) -> Tensor:
    """`gemm` with terms of adapters added before gate and residual, in one kernel (`adapts`)."""
    is_gated = around.gate in GATES
    tiles = tiling(*x.shape, x.shape[1] * weight.itemsize, is_gated, has_terms=True)
    assert tiles is not None, "`adapts` said so"
    return launch(tiles, x, weight, around, terms)


adapted_gemm.add(Implementation("gemv", adapted, "cuda", "sm_90a", adapts))


def launch(
    tiles: GemvTiling,
    x: Tensor,
    weight: Tensor,
    around: Around = PLAIN,
    terms: TermTable | None = None,
) -> Tensor:
    """`gemv` with tiles of choice."""
    num_rows, width = x.shape
    streams = 2 if around.gate in GATES else 1
    num_outputs = weight.shape[0] // streams
    out = around.residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    jit.require(out.stride(1) == 1, "gemv: elements of a row of the residual must be contiguous")
    num_ctas = min(tiles.ctas * jit.num_multiprocessors(x.get_device()), num_outputs)
    share = tiles.slot_rows // streams
    jit.launch(
        _variant(x.dtype, weight.dtype, tiles, around.gate, terms is not None),
        "gemv",
        (num_ctas,),
        THREADS + 32,
        x,
        x.stride(0),
        weight,
        around.norm,
        around.bias,
        around.columns,
        out,
        out.stride(0),
        num_rows,
        num_outputs,
        width,
        streams,
        share,
        THREADS // (tiles.rows * tiles.slot_rows) * share,
        tiles.num_slots,
        *divmod(num_outputs, num_ctas),
        int(around.residual is not None),
        around.eps,
        1.0 / width,
        *((around.shift,) if tiles.is_centred else ()),
        *(_behind(terms) if terms is not None else ()),
        shared_memory=tiles.bytes(width * weight.itemsize),
        overlaps=True,
    )
    return out


def _behind(terms: TermTable) -> tuple[Tensor | int, ...]:
    """Return the kernel's last arguments."""
    one, two, *_ = (*terms.sizes, 0)
    table = (terms.groups, len(terms.groups), terms.rows, terms.place)
    return *table, terms.scratch, width_of(terms.scratch), one, two
