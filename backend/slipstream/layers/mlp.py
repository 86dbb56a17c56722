"""The gated MLP (Shazeer, 2020) of Llama and its relatives, and Gemma's."""

from slipstream.layers.dims import Dims
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up packed; `out_norm` of what is added (Gemma)."""

    gate = "silu"

    def __init__(
        self, w: WeightSource, dims: Dims, bias: bool = False, out_norm: Norm | None = None
    ) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        gate_up = Linear.read(w, ("gate_proj", "up_proj"), (inner, inner), hidden, bias)
        self.gate_up = GatedLinear(gate_up, self.gate)
        self.down = LinearAdd(Linear.read(w, ("down_proj",), (hidden,), inner, bias), out_norm)

    def __call__(self, norm: Norm, residual: Residual) -> None:
        """`residual [n, hidden] += ` the MLP of `norm(residual)`."""
        self.down(self.gate_up(norm, residual), residual)


class GeluMLP(GatedMLP):
    """`GatedMLP` with GELU (its tanh form) in the place of SiLU."""

    gate = "gelu"
