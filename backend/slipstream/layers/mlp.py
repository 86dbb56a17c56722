"""MLPs: the gated ones (Shazeer, 2020) of Llama and its relatives, and the plain ones."""

from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.activation import EVERY, gegelu_mul, xielu
from slipstream.kernels.gemm.linear import Operand
from slipstream.layers.dims import Dims
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.norm import RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class TwoStepMLP:
    """An MLP in two steps, between which a parallel block has attention change the sum.

    `down` is that of every MLP: the layer that is added to the sum.
    """

    down: LinearAdd

    def inner(self, norm: RowNorm, residual: Residual) -> Operand:
        """Return what `down` reads, of `norm(residual)`: `[n, intermediate]`."""
        raise NotImplementedError

    def __call__(self, norm: RowNorm, residual: Residual) -> None:
        """`residual [n, hidden] += ` the MLP of `norm(residual)`."""
        self.down(self.inner(norm, residual), residual)


class GatedMLP(TwoStepMLP):
    """`down(silu(gate(x)) * up(x))`, gate and up stacked; `out_norm` of what is added (Gemma)."""

    gate = "silu"

    def __init__(
        self, w: WeightSource, dims: Dims, bias: bool = False, out_norm: RowNorm | None = None
    ) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        gate_up = Linear.read(w, ("gate_proj", "up_proj"), (inner, inner), hidden, bias)
        self.gate_up = GatedLinear(gate_up, self.gate)
        self.down = LinearAdd(Linear.read(w, ("down_proj",), (hidden,), inner, bias), out_norm)

    def inner(self, norm: RowNorm, residual: Residual) -> Operand:
        """Return the gated values, quantised if `down` would quantise them."""
        return self.gate_up(norm, residual)


class GeluMLP(GatedMLP):
    """`GatedMLP` with GELU (its tanh form) in the place of SiLU."""

    gate = "gelu"


class GegeluMLP(TwoStepMLP):
    """`down(quick_gelu(gate(x)) * (up(x) + 1))`, both cut off at a limit first (Phi-3-small).

    Args:
        w: where the matrices are, `gate_proj`, `up_proj` and `down_proj`.
        dims: of the model.
        bias: whether they have biases.
        out_norm: of what is added to the residual sum.
        limit: the gate is at most so large, `up` within as much.
    """

    def __init__(
        self,
        w: WeightSource,
        dims: Dims,
        bias: bool = False,
        out_norm: RowNorm | None = None,
        limit: float = inf,
    ) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        read = Linear.read(w, ("gate_proj", "up_proj"), (inner, inner), hidden, bias)
        self.gate_up, self.limit = NormLinear(read), limit
        self.down = LinearAdd(Linear.read(w, ("down_proj",), (hidden,), inner, bias), out_norm)

    def inner(self, norm: RowNorm, residual: Residual) -> Operand:
        """Return the gated values, `[n, intermediate]`."""
        y, scales = self.gate_up(norm, residual)
        assert scales is None, "a gate applies no scales"
        return gegelu_mul(y, self.limit)


class PlainMLP(TwoStepMLP):
    """`down(act(up(x)))`; `out_norm` of what is added.

    Args:
        w: where the matrices are, `up_proj` and `down_proj`.
        dims: of the model.
        activation: a name of `kernels/elementwise/activation.py`.
        bias: whether both have biases.
        out_norm: of what is added to the residual sum.
    """

    def __init__(
        self,
        w: WeightSource,
        dims: Dims,
        activation: str,
        bias: bool = False,
        out_norm: RowNorm | None = None,
    ) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        up = Linear.read(w, ("up_proj",), (inner,), hidden, bias)
        self.up = GatedLinear(up, EVERY + activation)
        self.down = LinearAdd(Linear.read(w, ("down_proj",), (hidden,), inner, bias), out_norm)

    def inner(self, norm: RowNorm, residual: Residual) -> Operand:
        """Return the activated values, quantised if `down` would quantise them."""
        return self.up(norm, residual)


class XieluMLP(TwoStepMLP):
    """`down(xielu(up(x)))`, whose activation has numbers of its own in `act_fn` (Apertus).

    Args:
        w: where the matrices are, `up_proj` and `down_proj`, and the numbers.
        dims: of the model.
        bias: whether both matrices have biases.
        out_norm: of what is added to the residual sum.
    """

    def __init__(
        self, w: WeightSource, dims: Dims, bias: bool = False, out_norm: RowNorm | None = None
    ) -> None:
        hidden, inner = dims.hidden_size, dims.intermediate_size
        self.up = NormLinear(Linear.read(w, ("up_proj",), (inner,), hidden, bias))
        self.down = LinearAdd(Linear.read(w, ("down_proj",), (hidden,), inner, bias), out_norm)
        self.numbers = _xielu_numbers(w.at("act_fn"))

    def inner(self, norm: RowNorm, residual: Residual) -> Operand:
        """Return the activated values, `[n, intermediate]`."""
        y, scales = self.up(norm, residual)
        assert scales is None, "an activation applies no scales"
        return xielu(y, self.numbers)


def _xielu_numbers(w: WeightSource) -> Tensor:
    """Return alpha of both sides, beta and what the exponent is at most, `[4] f32`."""
    above, below = (
        functional.softplus(w.stacked([name], [1], dtype=torch.float32))
        for name in ("alpha_p", "alpha_n")
    )
    beta, most = (
        w.stacked([name], [], dtype=torch.float32).reshape(1)
        if w.has(name)
        else torch.full((1,), value, device=above.device)
        for name, value in (("beta", 0.5), ("eps", -1e-6))
    )
    return torch.cat((above, beta + below, beta, most))
