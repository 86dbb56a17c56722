"""Matrix products with a checkpoint's weights, and what stands before and after them in a block.

`weight` is `[outputs, inputs]` as in the checkpoint. The product is accumulated in fp32 and rounded
once, after what follows it.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.activation import silu_mul
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.gemm.cublaslt import matmul
from slipstream.kernels.gemm.sm90 import gemv, skinny, tall
from slipstream.kernels.runtime.op import op


@op("x[n,k]:T, weight[m,k]:T")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`, `[n, m]`."""
    return functional.linear(x, weight, bias)


@op("x[n,k]:T, weight[m,k]:T, residual[n,m]:T")
def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> None:
    """`residual += x W^T + b`, in place."""
    if bias is not None:
        residual += bias
    residual.addmm_(x, weight.t())


@op("x[n,k]:T, norm[k]:T, weight[m,k]:T")
def norm_linear(
    x: Tensor,
    norm: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    plus_one: bool = False,
) -> Tensor:
    """`linear(rms_norm(x))`."""
    return functional.linear(rms_norm.reference(x, norm, eps, plus_one), weight, bias)


@op("x[n,k]:T, norm[k]:T, weight[_,k]:T")
def norm_gate_up(
    x: Tensor, norm: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> Tensor:
    """`silu(gate) * up` of `[gate | up] = linear(rms_norm(x))`; `[n, outputs / 2]`."""
    return silu_mul.reference(norm_linear.reference(x, norm, weight, eps, bias))


# ---- on a GPU ----
# One or two rows are multiplied by `gemv`, all in one kernel; up to 128 by `wide`, and gates and
# ups of some 200 to 256 by `tall`, behind that of the norm; others by cuBLASLt, between those of
# the norm and the gate.


def own_kernel(x: Tensor, weight: Tensor, gated: bool = False) -> Callable[..., Tensor] | None:
    """`wide` or `tall`, the one that takes this product; None: it is cuBLASLt's."""
    if skinny.takes(x, weight, gated):
        return skinny.wide
    return tall.tall if tall.takes(x, weight, gated) else None


@linear.cuda
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if gemv.takes(x, weight):
        return gemv.gemv(x, weight, bias=bias)
    if (own := own_kernel(x, weight)) is not None:
        return own(x, weight, bias=bias)
    if bias is None:
        return matmul(x, weight)
    return matmul(x, weight, bias.repeat(len(x), 1), accumulate=True)


@linear_add.cuda
def _linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> None:
    if gemv.takes(x, weight):
        gemv.gemv(x, weight, bias=bias, residual=residual)
    elif (own := own_kernel(x, weight)) is not None:
        own(x, weight, bias=bias, residual=residual)
    else:
        if bias is not None:
            residual += bias
        matmul(x, weight, residual, accumulate=True)


@norm_linear.cuda
def _norm_linear(
    x: Tensor,
    norm: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    plus_one: bool = False,
) -> Tensor:
    if not plus_one and gemv.takes(x, weight, norm):
        return gemv.gemv(x, weight, norm=norm, eps=eps, bias=bias)
    return _linear(rms_norm(x, norm, eps, plus_one), weight, bias)


@norm_gate_up.cuda
def _norm_gate_up(
    x: Tensor, norm: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> Tensor:
    if gemv.takes(x, weight, norm, gated=True):
        return gemv.gemv(x, weight, norm=norm, eps=eps, bias=bias, gated=True)
    normed = rms_norm(x, norm, eps)
    if (own := own_kernel(normed, weight, gated=True)) is not None:
        return own(normed, weight, bias=bias, gated=True)
    return silu_mul(_linear(normed, weight, bias))
