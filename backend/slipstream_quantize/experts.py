"""Experts of a mixture as linear layers that are watched, a pair of them for each expert."""

import itertools
from collections.abc import Callable

import torch
from slipstream import quant
from slipstream.kernels.experts.combine import Shared, combine
from slipstream.kernels.experts.grouped import ExpertMatrix, gated
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.gemm.op import Matrix
from slipstream.layers.experts import Experts
from slipstream.layers.linear import Linear
from torch import Tensor

from slipstream_quantize.observe import Probe

Watch = Callable[[Linear], Probe]  # puts a probe in a layer's place


class ProbedExperts(Experts):
    """A mixture whose weights stay where they are; a `Probe` multiplies with those of each expert.

    Attributes:
        pairs: gate and up, and down, of each expert.
    """

    def __init__(self, experts: Experts, watch: Watch) -> None:
        vars(self).update(vars(experts))
        count = self.config.routing.num_experts
        self.pairs = [
            (watch(_linear(self.gate_up, i)), watch(_linear(self.down, i))) for i in range(count)
        ]

    def add(self, x: Tensor, routed: Routed, residual: Tensor, shared: Shared | None) -> Tensor:
        """Add the outputs of rows' experts, by their probes, and what is shared; return the sum."""
        return combine(residual, self._products(x, routed), shared)

    def _products(self, x: Tensor, routed: Routed) -> Tensor:
        """Return the outputs of pairs of rows and experts, times their weights."""
        out = torch.empty(len(routed.order), x.shape[1], dtype=x.dtype, device=x.device)
        weights = routed.weights.flatten()
        ends = itertools.pairwise(routed.offsets.tolist())
        for (begin, end), (gate_up, down) in zip(ends, self.pairs, strict=True):
            if begin < end:
                places = routed.order[begin:end].long()
                rows = gate_up(x[places // routed.top_k])
                inner = gated(rows.float(), self.config.gate).to(x.dtype)
                out[places] = (down(inner).float() * weights[places, None]).to(x.dtype)
        return out


def _linear(matrix: ExpertMatrix, expert: int) -> Linear:
    """Return the layer of one expert, whose weights are those of the mixture."""
    bias = None if matrix.bias is None else matrix.bias[expert]
    return Linear(quant.named("none"), Matrix(matrix.values[expert]), bias)
