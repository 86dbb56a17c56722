"""The gated MLP of Llama and its relatives."""

from slipstream.layers.dims import Dims
from slipstream.layers.norm import Norm
from slipstream.layers.projection import project
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up packed."""

    def __init__(self, w: WeightSource, dims: Dims, bias: bool = False) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        self.gate_up = project(w, ("gate_proj", "up_proj"), (inner, inner), hidden, bias)
        self.down = project(w, ("down_proj",), (hidden,), inner, bias)

    def __call__(self, norm: Norm, residual: Residual) -> None:
        """`residual [n, hidden] += ` the MLP of `norm(residual)`."""
        self.down.add_to(residual, self.gate_up.gate_of_norm(norm, residual))
