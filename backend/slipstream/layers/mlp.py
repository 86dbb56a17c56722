"""The gated MLP of Llama and its relatives."""

from torch import Tensor

from slipstream.kernels.activation import silu_mul
from slipstream.layers.dims import Dims
from slipstream.layers.linear import Linear, WeightSource


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up packed."""

    def __init__(self, w: WeightSource, dims: Dims, bias: bool = False) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        self.gate_up = Linear(w, ("gate_proj", "up_proj"), (inner, inner), hidden, bias)
        self.down = Linear(w, ("down_proj",), (hidden,), inner, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, hidden] -> [n, hidden]`."""
        return self.down(silu_mul(self.gate_up(x)))
