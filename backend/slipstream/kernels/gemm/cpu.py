"""GEMMs on a CPU: torch's."""

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.activation import activate
from slipstream.kernels.elementwise.eight_bits import PRODUCTS
from slipstream.kernels.gemm.op import INT8, PLAIN, Around, Spec, gemm, normed


def takes(spec: Spec) -> str | None:
    """Say why torch does not compute a product with what is around it; None: it does."""
    if spec.packing is not None:
        return "takes weights as a checkpoint has them"
    if spec.weight != spec.x:
        return "takes rows and weights of one type"
    if spec.x in PRODUCTS and (spec.scales or spec.bias or spec.gate or spec.residual):
        return "makes products of 8 bits alone"
    return None


@gemm.implementation("torch", "cpu", takes=takes)
def cpu(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` by torch, each stage rounded to the dtype of `x`; e4m3 to bf16, and int8 exact."""
    if x.dtype in PRODUCTS:
        wide = torch.float64 if x.dtype == INT8 else torch.float32
        return functional.linear(x.to(wide), weight.to(wide)).to(PRODUCTS[x.dtype])
    bias, residual = around.bias, around.residual
    if around.norm is not None:
        x = normed(x, around)
    if residual is not None and not around.gate:
        if bias is not None:
            residual += bias
        return residual.addmm_(x, weight.t())
    y = functional.linear(x, weight, bias)
    if around.gate:
        y = activate(around.gate, y)
    return y if residual is None else residual.add_(y)
