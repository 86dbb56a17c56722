"""RMS normalisation (Zhang and Sennrich, 2019), alone and with the residual sum before it."""

import torch
from torch import Tensor

from slipstream.kernels.op import op


@op("x[n,d]:T, weight[d]:T")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`, accumulated in fp32 and rounded once. Rows of `x` may be strided."""
    x32 = x.float()
    rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * rstd * weight.float()).to(x.dtype)


@op("x[n,d]:T, residual[n,d]:T, weight[d]:T")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place (rounded to its dtype), then `rms_norm(residual)`."""
    residual += x
    return rms_norm.reference(residual, weight, eps)
