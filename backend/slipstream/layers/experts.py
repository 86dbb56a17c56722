"""A mixture of experts (Shazeer et al., 2017): a router chooses the MLPs of each row.

    router -> choice, places -> gates and ups of places -> outputs of pairs -> sum

Everything happens on the device, with launches whose shapes depend on the number of rows alone, so
that CUDA graphs hold them. Weights of all experts are one tensor, `[e, 2i, h]` and `[e, h, i]`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream import quant
from slipstream.kernels.elementwise.activation import silu_mul
from slipstream.kernels.experts.combine import combine
from slipstream.kernels.experts.grouped import ExpertMatrix, down, gate_up, tile_rows
from slipstream.kernels.experts.route import Routed, route
from slipstream.kernels.gemm.op import Matrix
from slipstream.layers.dims import ExpertsConfig
from slipstream.layers.linear import Linear
from slipstream.layers.norm import RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource
from slipstream.quant.auto import dequantised
from slipstream.quant.matrix import write
from slipstream.quant.rounding import rounded_e4m3

SCHEMES = ("auto", "none", "fp8")  # that experts can be kept in
_ALIGNED = 8  # outputs of the router


class SharedExpert:
    """The gated MLP of all rows, before its gate."""

    def __init__(self, w: WeightSource, hidden: int, inner: int) -> None:
        self.gate_up = Linear.read(w, ("gate_proj", "up_proj"), (inner, inner), hidden)
        self.down = Linear.read(w, ("down_proj",), (hidden,), inner)

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, h] -> [n, h]`."""
        return self.down(silu_mul(self.gate_up(x)))


class Experts:
    """`sum over the chosen of weight * down(act(gate(x)) * up(x))`, and a shared expert.

    Args:
        w: weights; their names are `gate` (the router), `experts.N.gate_proj`, `up_proj` and
            `down_proj`, `shared_expert`, `shared_expert_gate`.
        config: sizes and routing.
        hidden: size of a row.
        out_norm: of what is added.
    """

    def __init__(
        self, w: WeightSource, config: ExpertsConfig, hidden: int, out_norm: RowNorm | None = None
    ) -> None:
        self.config = config
        self.is_fixed = w.deterministic
        self.out_norm = out_norm
        self.router = _router(w, config, hidden)
        self.correction = None
        if config.corrected:
            name = "gate.e_score_correction_bias"
            self.correction = w.tensor(name, config.routing.num_experts).float()
        self.gate_up = _matrix(w, ("gate_proj", "up_proj"), config, config.inner_size, hidden)
        self.down = _matrix(w, ("down_proj",), config, hidden, config.inner_size)
        # What changes outputs of experts `[n * k, h]` of rows `[n, h]`, in place.
        self.adapt: Callable[[Tensor, Routed, Tensor], None] | None = None
        self.shared: SharedExpert | None = None
        if config.shared_size:
            self.shared = SharedExpert(w.at("shared_expert"), hidden, config.shared_size)

    def __call__(self, norm: RowNorm, residual: Residual) -> None:
        """`residual [n, h] += ` the experts of `norm(residual)`."""
        x = norm(residual.values)
        logits = self.router(x)
        routed = self.routed(logits)
        products = self.products(x, routed)
        if self.adapt is not None:
            self.adapt(x, routed, products)
        shared = gate = None
        if self.shared is not None:
            shared = self.shared(x)
            if self.config.shared_gated:
                first = self.config.routing.num_experts
                gate = logits[:, first : first + 1]
        if self.out_norm is None:
            combine(residual.values, products, shared, gate)
            return
        total = combine(torch.zeros_like(x), products, shared, gate)
        residual.values.add_(self.out_norm(total))

    def products(self, x: Tensor, routed: Routed) -> Tensor:
        """Return the outputs of pairs of rows `[n, h]` and experts, times their weights."""
        fixed, kind = self.is_fixed, self.config.gate
        inner = gate_up(x, self.gate_up.values, self.gate_up, routed, kind, fixed)
        return down(inner, self.down.values, self.down, routed, fixed)

    def routed(self, logits: Tensor) -> Routed:
        """Choose experts by the router's outputs, and put their rows in order."""
        routing = self.config.routing
        pairs, is_fp8 = len(logits) * routing.top_k, self.gate_up.scales is not None
        rows = tile_rows(pairs, routing.num_experts, is_fp8, self.is_fixed, logits.device)
        return route(logits[:, : routing.num_experts], routing, rows, self.correction)


def _router(w: WeightSource, config: ExpertsConfig, hidden: int) -> Linear:
    """Read the router, with the gate of the shared expert behind it, in the model's dtype."""
    count = config.routing.num_experts
    names, rows = ["gate"], [count]
    if config.shared_gated:
        names.append("shared_expert_gate")
        rows.append(1)
    parts = [w.stacked([f"{name}.weight" for name in names], rows, hidden)]
    unused = -sum(rows) % _ALIGNED
    parts.append(parts[0].new_zeros(unused, hidden))
    bias = None
    if config.bias:
        bias = torch.nn.functional.pad(w.tensor("gate.bias", count), (0, unused))
    return Linear(quant.named("none"), Matrix(torch.cat(parts)), bias, w.deterministic)


def _matrix(
    w: WeightSource, names: tuple[str, ...], config: ExpertsConfig, outputs: int, inputs: int
) -> ExpertMatrix:
    """Read the matrices `names` of all experts, `[outputs, inputs]` each, into one tensor."""
    assert w.quantization in SCHEMES, f"experts in {w.quantization}"
    count = config.routing.num_experts
    if config.is_fused:
        values, bias = _fused(w, names, config, outputs, inputs)
    else:
        values, bias = _separate(w, names, config, outputs, inputs)
    if w.quantization != "fp8":
        return ExpertMatrix(values, None, bias)
    rounded, scales = rounded_e4m3(values.view(-1, inputs))
    return ExpertMatrix(rounded.view(values.shape), scales.view(count, -1), bias)


def _separate(
    w: WeightSource, names: tuple[str, ...], config: ExpertsConfig, outputs: int, inputs: int
) -> tuple[Tensor, Tensor | None]:
    """Read `experts.N.NAME` of all experts: weights and biases."""
    count = config.routing.num_experts
    full = [f"experts.{expert}.{name}" for expert in range(count) for name in names]
    rows = [outputs] * len(full)
    parts = [w.quantized(name, outputs, inputs) for name in full]
    if any(part is not None for part in parts):
        _note(w)
        values = dequantised(w, list(zip(full, rows, strict=True)), parts, inputs)
    else:
        values = w.stacked([f"{name}.weight" for name in full], rows, inputs)
    bias = None
    if config.bias:
        bias = w.stacked([f"{name}.bias" for name in full], rows).view(count, -1)
    return values.view(count, -1, inputs), bias


def _fused(
    w: WeightSource, names: tuple[str, ...], config: ExpertsConfig, outputs: int, inputs: int
) -> tuple[Tensor, Tensor | None]:
    """Read `experts.NAME`, of gate and up `gate_up_proj`, which has all experts."""
    count, rows = config.routing.num_experts, outputs * len(names)
    name = f"experts.{'gate_up_proj' if len(names) > 1 else names[0]}"
    matrix = w.quantized(name, count * rows, inputs)
    if matrix is None:
        values = w.tensor(name, count, inputs, rows).transpose(1, 2)
    else:
        _note(w)
        values = torch.empty(count * rows, inputs, dtype=w.dtype, device=w.device)
        write(matrix, values)
        values = values.view(count, rows, inputs)
    bias = w.tensor(f"{name}_bias", count, rows) if config.bias else None
    if len(names) > 1:
        values = torch.cat([values[:, ::2], values[:, 1::2]], 1)
        bias = None if bias is None else torch.cat([bias[:, ::2], bias[:, 1::2]], 1)
    return values.contiguous(), bias


def _note(w: WeightSource) -> None:
    dtype = str(w.dtype).removeprefix("torch.")
    w.note(f"experts: dequantised to {dtype} as they are loaded; no GEMM here takes them packed")
