"""Gated activations between the two halves of an MLP (Shazeer, 2020)."""

from torch import Tensor
from torch.nn import functional

from slipstream.kernels.op import op


@op("gate_up[n,_]:T")
def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up = [gate | up]`, in fp32, rounded once; shape `[n, width / 2]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
