"""The GEMM of a linear layer, with the stages that may stand around the product.

The order of the stages, wherever they are computed:

    addend -> norm -> quantise -> PRODUCT -> scales -> bias -> gate | residual

An implementation says which of them it takes (fuses). What none takes is computed around it, by
`linear.py`. Of a layer whose inputs ranks share, the sum over ranks is an addend of the next norm,
which may be fused with it (`kernels/comm/`). What adapters add differs by row and step, and is no
stage: `layers/adapted.py`; of few rows a GEMM may add it (`TermTable`).

`weight` is `[outputs, inputs]` as in a checkpoint. Sums are accumulated in fp32 and rounded
once, behind the last stage that an implementation takes.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.activation import GATES, activate
from slipstream.kernels.elementwise.eight_bits import E4M3 as E4M3
from slipstream.kernels.elementwise.eight_bits import INT8 as INT8
from slipstream.kernels.elementwise.eight_bits import PRODUCTS
from slipstream.kernels.elementwise.norm import layer_norm, rms_norm
from slipstream.kernels.elementwise.scales import Scales, ones, scaled
from slipstream.kernels.gemm import cpu_packing
from slipstream.kernels.gemm.packing import Groups, Packing, arranged, dense
from slipstream.kernels.runtime.op import op
from slipstream.kernels.runtime.registry import Implementations, Target, target_of

ALIGNED = 16  # bytes


class Matrix(NamedTuple):
    """Weights of a linear layer in the form that GEMMs take."""

    values: Tensor  # [m, k]; packed ones of fewer bits (`packing.py`) i32
    scales: Tensor | None = None  # [m] f32, of rows of values of 8 bits
    groups: Groups | None = None  # of packed values

    @property
    def rounds_to(self) -> torch.dtype:
        """Name the type of rows of 8 bits that are multiplied with it: e4m3 where it is packed."""
        return INT8 if self.values.dtype == INT8 else E4M3

    @property
    def takes_quantized(self) -> bool:
        """Whether any rows may come in 8 bits, as a kernel before quantised them."""
        if self.groups is None:
            return self.values.dtype in PRODUCTS
        return self.groups.packing.for_e4m3 and self.groups.is_plain


class Addend(Protocol):
    """A product that is still to be added to the residual sum, in place."""

    def add_to(self, values: Tensor) -> None:
        """Add it to `values [n, k]`."""


class Around(NamedTuple):
    """The stages around a product of `n` rows and `m` columns; the kernels' argument struct."""

    norm: Tensor | None = None  # [k]: weight of the norm of x
    eps: float = 0.0
    plus_one: bool = False  # the norm's weight is 1 + norm
    is_centred: bool = False  # it is a layer norm; else an RMS norm
    shift: Tensor | None = None  # [k]: bias of a layer norm
    rows: Tensor | None = None  # [n] f32: scales of x of 8 bits
    columns: Tensor | None = None  # [m] f32: scales of weights of 8 bits
    bias: Tensor | None = None  # [m]
    # "silu", "gelu": of [gate | up], whose product of m / 2 columns is left; "every NAME": an
    # activation of every column (`kernels/elementwise/activation.py`).
    gate: str = ""
    residual: Tensor | None = None  # [n, m]: added to in place
    addend: Addend | None = None  # added to x, in place, before all else
    groups: Groups | None = None  # of packed weights
    out: torch.dtype | None = None  # of outputs, where x is of 8 bits and there is no residual

    @property
    def norm_kind(self) -> str:
        """Return the norm as `Spec` names it."""
        if self.norm is None or self.is_centred:
            return "" if self.norm is None else "layer norm"
        return "norm plus one" if self.plus_one else "norm"

    def out_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of outputs behind all stages; bf16 where nothing says another."""
        if self.residual is not None:
            return self.residual.dtype
        if x.dtype not in PRODUCTS:
            return x.dtype
        return torch.bfloat16 if self.out is None else self.out

    @property
    def scales(self) -> Scales | None:
        """Scales and bias that a product of 8 bits by 8 still needs; None of any other."""
        if self.rows is None or self.groups is not None:
            return None
        assert self.columns is not None, "rows of 8 bits multiply weights of 8 bits"
        return Scales(self.rows, self.columns, self.bias)

    @property
    def scales_behind(self) -> Scales:
        """Scales and bias that a product still needs which was made without them."""
        if (found := self.scales) is not None:
            return found
        assert self.rows is not None, "rows are of e4m3"
        assert self.groups is not None, "else there are scales of columns"
        count = self.groups.packing.outputs
        columns = ones(count, self.rows.device) if self.columns is None else self.columns
        return Scales(self.rows, columns, self.bias)


PLAIN = Around()


class TermTable(NamedTuple):
    """What adapters add to a few rows of a result: `t B^T` of `t = x A^T` (`kernels/lora/`)."""

    groups: Tensor  # [g, 2] i64: of a table of the step's adapters
    rows: Tensor  # [n] i32: likewise
    place: int
    scratch: Tensor  # i32, as `scratch_of` makes it
    sizes: tuple[int, ...]  # outputs of each part, three at most


MOST_ADAPTED_ROWS = 8
COUNTS = 4  # words of the scratch memory before t
WHOLE_ROWS = 2  # of t, whose sums are over all inputs
MOST_SPLITS = 32  # of each other row of t: partial sums
_T_ROWS = WHOLE_ROWS + MOST_ADAPTED_ROWS * MOST_SPLITS


def scratch_of(width: int, device: torch.device) -> Tensor:
    """Return what GEMMs with terms share: counts, and rows of t, of which those of partial sums
    are 0 before and after a GEMM. They have `width` columns, a multiple of 16.
    """
    return torch.zeros(COUNTS + _T_ROWS * width, dtype=torch.int32, device=device)


def width_of(scratch: Tensor) -> int:
    """Return the columns of t that `scratch_of` made room for."""
    return (len(scratch) - COUNTS) // _T_ROWS


class Spec(NamedTuple):
    """All that implementations of `gemm` choose by."""

    rows: int
    inputs: int
    outputs: int  # rows of the weights
    x: torch.dtype
    weight: torch.dtype
    out: torch.dtype  # that the model's layers have
    norm: str  # "", "norm", "norm plus one" (by RMS), "layer norm"
    scales: str  # "", "columns" (of weights), "both" (of x, too)
    bias: bool
    gate: str
    residual: bool
    x_aligned: bool  # x begins at 16 bytes, and elements of a row are contiguous
    x_pitch: bool  # its rows are a multiple of 16 bytes apart
    weight_aligned: bool  # contiguous, from 16 bytes on
    norm_aligned: bool
    target: Target
    packing: Packing | None = None  # of packed weights


def spec_of(x: Tensor, weight: Tensor, around: Around) -> Spec:
    """Return the spec of a GEMM, by which an implementation is chosen."""
    norms = [each for each in (around.norm, around.shift) if each is not None]
    scales = "both" if around.rows is not None else "" if around.columns is None else "columns"
    out = around.out_dtype(x)
    packing = None if around.groups is None else around.groups.packing
    return Spec(
        rows=x.shape[0],
        inputs=x.shape[1],
        outputs=weight.shape[0] if packing is None else packing.outputs,
        x=x.dtype,
        weight=weight.dtype,
        out=out,
        norm=around.norm_kind,
        scales=scales,
        bias=around.bias is not None,
        gate=around.gate,
        residual=around.residual is not None,
        x_aligned=x.data_ptr() % ALIGNED == 0 and x.stride(1) == 1,
        x_pitch=x.stride(0) * x.itemsize % ALIGNED == 0,
        weight_aligned=weight.data_ptr() % ALIGNED == 0 and weight.is_contiguous(),
        norm_aligned=all(each.data_ptr() % ALIGNED == 0 for each in norms),
        target=target_of(x.device),
        packing=packing,
    )


def normed(x: Tensor, around: Around) -> Tensor:
    """Apply the norm among the stages to rows `[n, k]`, by a kernel of its own."""
    assert around.norm is not None, "there is a norm"
    if around.is_centred:
        return layer_norm(x, around.norm, around.shift, around.eps)
    return rms_norm(x, around.norm, around.eps, around.plus_one)


def unpacked(values: Tensor, groups: Groups) -> Tensor:
    """Return the weights that packed ones stand for, `[m, k]` fp32, of inputs as they lie."""
    is_tiled = groups.packing.layout in (cpu_packing.LAYOUT, cpu_packing.ROWS)
    return (cpu_packing.dense if is_tiled else dense)(values, groups)


@op("x[n,k]:T, weight[_,_]:W", spec=spec_of, package=__package__)
def gemm(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`x W^T` with what is around it, `[n, m]`, `[n, m / 2]` behind a gate; `residual` if given.

    Args:
        x: fp32, fp16, bf16, e4m3 or int8.
        weight: of the type of `x`, of 8 bits, or packed.
        around: the stages; a product of e4m3 by e4m3 is rounded to bf16 before its scales, one by
            packed weights is not. A route that leaves scales to another kernel rounds either. One
            of int8 by int8 is exact, and in int32 without scales.
    """
    y = x.float()
    if around.is_centred and around.norm is not None:
        shift = None if around.shift is None else around.shift.float()
        y = functional.layer_norm(y, y.shape[-1:], around.norm.float(), shift, around.eps)
    elif around.norm is not None:
        factor = around.norm.float() + (1 if around.plus_one else 0)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + around.eps) * factor
    if around.groups is not None:
        y = functional.linear(arranged(y, around.groups), unpacked(weight, around.groups))
    elif x.dtype == INT8:  # a sum has more bits than fp32
        y = functional.linear(x.double(), weight.double())
    else:
        y = functional.linear(y, weight.float())
    dtype = PRODUCTS.get(x.dtype, x.dtype)
    if around.scales is not None:
        y = scaled(y.to(dtype), *around.scales)
        dtype = around.out_dtype(x)
    else:
        y = y if around.rows is None else y * around.rows[:, None]
        y = y if around.columns is None else y * around.columns
        y = y if around.bias is None else y + around.bias.float()
    if around.gate:
        gate = GATES.get(around.gate)
        y = activate(around.gate, y) if gate is None else gate.oracle(y)
    if around.residual is not None:
        return around.residual.copy_(around.residual.float() + y)
    return y.to(dtype)


adapted_gemm: Implementations[Spec] = Implementations(__package__)
"""GEMMs that also add terms of adapters, before gate and sum; what none takes is done in three."""
