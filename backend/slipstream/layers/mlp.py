"""The gated MLP of Llama and its relatives, and Gemma's."""

from slipstream.kernels.elementwise.activation import gelu_mul
from slipstream.layers.dims import Dims
from slipstream.layers.norm import Norm
from slipstream.layers.projection import normed, project
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up packed; `out_norm` of what is added (Gemma)."""

    def __init__(
        self, w: WeightSource, dims: Dims, bias: bool = False, out_norm: Norm | None = None
    ) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        self.gate_up = project(w, ("gate_proj", "up_proj"), (inner, inner), hidden, bias)
        self.down = normed(project(w, ("down_proj",), (hidden,), inner, bias), out_norm)

    def __call__(self, norm: Norm, residual: Residual) -> None:
        """`residual [n, hidden] += ` the MLP of `norm(residual)`."""
        self.down.add_to(residual, self.gate_up.gate_of_norm(norm, residual))


class GeluMLP(GatedMLP):
    """The same with GELU (its tanh form) in the place of SiLU."""

    def __call__(self, norm: Norm, residual: Residual) -> None:
        """`residual [n, hidden] += ` the MLP of `norm(residual)`."""
        product, scales = self.gate_up.of_norm(norm, residual)
        assert scales is None, "no family with this gate is quantised"
        self.down.add_to(residual, gelu_mul(product))
