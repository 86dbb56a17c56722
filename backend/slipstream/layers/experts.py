"""A mixture of experts (Shazeer et al., 2017): a router chooses the MLPs of each row.

    router -> choice, places -> gates and ups of places -> outputs of pairs -> sum

Everything happens on the device, with launches whose shapes depend on the number of rows alone, so
that CUDA graphs hold them. Weights of all experts are one tensor, `[e, 2i, h]` and `[e, h, i]`,
or packed.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream import quant
from slipstream.kernels.elementwise.activation import silu_mul
from slipstream.kernels.elementwise.eight_bits import E4M3
from slipstream.kernels.experts.combine import Shared, combine
from slipstream.kernels.experts.down_add import down_add
from slipstream.kernels.experts.down_add import takes as takes_down
from slipstream.kernels.experts.grouped import (
    Added,
    ExpertMatrix,
    down,
    expert_matrix,
    gate_up,
    tile_rows,
)
from slipstream.kernels.experts.route import Routed, route
from slipstream.kernels.experts.router import Chosen, RouterStages, choose_rows
from slipstream.kernels.experts.router import takes as takes_router
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packing import TILE
from slipstream.kernels.lora.pairs import PairTable
from slipstream.kernels.runtime.registry import Target, target_of
from slipstream.layers.dims import ExpertsConfig
from slipstream.layers.linear import Linear
from slipstream.layers.norm import Norm, RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource
from slipstream.quant.auto import AtLoad, dequantised, joined
from slipstream.quant.forms import (
    FORMS,
    dtype_of_numbers,
    form_of_experts,
    make_numbers,
    takes_numbers,
)
from slipstream.quant.matrix import QuantMatrix, selected, write
from slipstream.quant.rounding import rounded_e4m3

_ALIGNED = 8  # outputs of the router


class Started(NamedTuple):
    """What terms of a choice's pairs are finished with."""

    table: PairTable | None = None  # None: torch adds them
    added: Added | None = None  # to gates and ups


class PairTerms(Protocol):
    """What adapters make of a layer's experts."""

    @property
    def in_step(self) -> bool:
        """Whether an adapter of the step that runs has terms for them."""

    def start(self, x: Tensor, routed: Routed) -> Started:
        """Compute what is added to gates and ups of rows `[n, h]`."""

    def finish(
        self, x: Tensor, inner: Tensor, routed: Routed, products: Tensor, started: Started
    ) -> None:
        """Change the outputs of experts `[n * k, h]`, made of `inner [n * k, i]`, in place."""


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
        self.adapt: PairTerms | None = None
        self.shared: SharedExpert | None = None
        if config.shared_size:
            self.shared = SharedExpert(w.at("shared_expert"), hidden, config.shared_size)

    def __call__(self, norm: RowNorm, residual: Residual) -> None:
        """`residual [n, h] += ` the experts of `norm(residual)`."""
        x, outputs, routed = self.chosen(norm, residual.values)
        shared = None
        if self.shared is not None:
            gate = None
            if self.config.shared_gated:
                assert outputs is not None, "the shared expert's gate is among them"
                first = self.config.routing.num_experts
                gate = outputs[:, first : first + 1]
            shared = Shared(self.shared(x), gate)
        if self.config.scales_inputs:
            assert outputs is not None, "they are kept for it"
            x = _scaled(x, outputs[:, : self.config.routing.num_experts])
        if self.out_norm is None:
            self.add(x, routed, residual.values, shared)
            return
        total = self.add(x, routed, torch.zeros_like(x), shared)
        residual.values.add_(self.out_norm(total))

    def chosen(self, norm: RowNorm, x: Tensor) -> Chosen:
        """Normalise rows `[n, h]` and choose their experts."""
        router, routing = self.router, self.config.routing
        size = self.tile_rows(len(x), target_of(x.device), self.is_fixed)
        matrix = router.matrix
        if isinstance(norm, Norm) and matrix is not None and takes_router(x, matrix.values):
            keeps = self.config.shared_gated or self.config.scales_inputs
            of_router = router.bias, self.correction, norm.plus_one, keeps
            stages = RouterStages(norm.eps, routing, size, *of_router)
            return choose_rows(x, matrix.values, norm.weight, stages)
        normed = norm(x)
        outputs = router(normed)
        logits = outputs[:, : routing.num_experts]
        return Chosen(normed, outputs, route(logits, routing, size, self.correction))

    def add(self, x: Tensor, routed: Routed, residual: Tensor, shared: Shared | None) -> Tensor:
        """Add the outputs of rows' experts, and what is shared, to `residual`; return it."""
        fixed, up, last = self.is_fixed, self.gate_up, self.down
        adapt = self.adapt if self.adapt is not None and self.adapt.in_step else None
        started = Started() if adapt is None else adapt.start(x, routed)
        inner = gate_up(x, up.values, up, routed, self.config.gate, fixed, started.added)
        if adapt is None and takes_down(routed, last, x.device):
            return down_add(inner, last.values, residual, last, routed, shared)
        products = down(inner, last.values, last, routed, fixed)
        if adapt is not None:
            adapt.finish(x, inner, routed, products, started)
        return combine(residual, products, shared)

    def tile_rows(self, num_rows: int, target: Target, fixed: bool) -> int:
        """Choose the tiles of rows on a device; `fixed`: for deterministic mode."""
        routing, is_fp8 = self.config.routing, self.gate_up.values.dtype == E4M3
        pairs, count = num_rows * routing.top_k, routing.num_experts
        all_groups = (self.gate_up.groups, self.down.groups)
        packings = [groups.packing for groups in all_groups if groups is not None]
        return tile_rows(pairs, count, is_fp8, fixed, target, packings)


def _scaled(x: Tensor, logits: Tensor) -> Tensor:
    """Return rows `[n, h]` times a logistic function of the logit, of `[n, e]`, of the one expert
    of each, which is the largest.
    """
    return x * logits.amax(-1, keepdim=True).float().sigmoid().to(x.dtype)


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
    """Read the matrices `names` of all experts, `[outputs, inputs]` each, as one."""
    count = config.routing.num_experts
    read = _fused if config.is_fused else _separate
    values, bias = read(w, names, config, outputs, inputs)
    scheme = quant.named(w.quantization)
    if isinstance(scheme, AtLoad):
        assert isinstance(values, Tensor), "what is quantised has no other scheme"
        values = scheme.rounded(values.view(-1, inputs))
    if isinstance(values, QuantMatrix):
        return expert_matrix(_kept(w, values, count * len(names)), count, bias)
    if _takes_numbers(w, outputs):
        return expert_matrix(_numbers(w, values), count, bias)
    if w.quantization != "fp8":
        return ExpertMatrix(values, None, bias)
    rounded, scales = rounded_e4m3(values.view(-1, inputs))
    return ExpertMatrix(rounded.view(values.shape), scales.view(count, -1), bias)


def _dtype_of(w: WeightSource, names: list[str], outputs: int) -> torch.dtype | None:
    """Return the dtype of weights that are not quantised for the processor's kernels, if any."""
    return dtype_of_numbers(w, names) if _takes_numbers(w, outputs) else None


def _takes_numbers(w: WeightSource, outputs: int) -> bool:
    """Whether the processor's kernels take weights of 16 and 32 bits.

    Experts begin at tiles, and so do gates and ups.
    """
    return w.quantization == "auto" and outputs % TILE == 0 and takes_numbers(w)


def _numbers(w: WeightSource, values: Tensor) -> Matrix:
    """Put experts `[e, m, k]` in the order of the processor's kernels."""
    w.note(f"experts of {str(values.dtype).removeprefix('torch.')}: {FORMS[0].name}")
    return make_numbers(values.reshape(-1, values.shape[-1]))


def _kept(w: WeightSource, matrix: QuantMatrix, count: int) -> Matrix:
    """Return `count` matrices under one another as kernels take them, dequantised if none does."""
    if (form := form_of_experts(matrix, count, w.target, w.dtype)) is not None:
        w.note(f"experts of {matrix}: {form.said(matrix)}")
        made = form.make(matrix)
        assert isinstance(made, Matrix), "of experts"
        return made
    _note(w, str(matrix))
    out = torch.empty(matrix.outputs, matrix.inputs, dtype=w.dtype, device=w.device)
    write(matrix, out)
    if _takes_numbers(w, matrix.outputs // count):
        return make_numbers(out)
    return Matrix(out)


def _separate(
    w: WeightSource, names: tuple[str, ...], config: ExpertsConfig, outputs: int, inputs: int
) -> tuple[Tensor | QuantMatrix, Tensor | None]:
    """Read `experts.N.NAME` of all experts: weights, `[e, m, k]` or quantised, and biases."""
    count = config.routing.num_experts
    full = [f"experts.{expert}.{name}" for expert in range(count) for name in names]
    rows = [outputs] * len(full)
    bias = None
    if config.bias:
        bias = w.stacked([f"{name}.bias" for name in full], rows).view(count, -1)
    parts = [w.quantized(name, outputs, inputs) for name in full]
    found = [part for part in parts if part is not None]
    if not found:
        weights = [f"{name}.weight" for name in full]
        dtype = _dtype_of(w, weights, outputs)
        return w.stacked(weights, rows, inputs, dtype=dtype).view(count, -1, inputs), bias
    whole = joined(w, found) if len(found) == len(parts) and w.quantization == "auto" else None
    if whole is not None:
        return whole, bias
    _note(w, " and ".join(sorted({str(part) for part in found})))
    values = dequantised(w, list(zip(full, rows, strict=True)), parts, inputs)
    return values.view(count, -1, inputs), bias


def _fused(
    w: WeightSource, names: tuple[str, ...], config: ExpertsConfig, outputs: int, inputs: int
) -> tuple[Tensor | QuantMatrix, Tensor | None]:
    """Read `experts.NAME`, of gate and up `gate_up_proj`, which has all experts.

    Rows of gate and up take turns there; of those returned all gates are first.
    """
    count, rows = config.routing.num_experts, outputs * len(names)
    name = f"experts.{'gate_up_proj' if len(names) > 1 else names[0]}"
    bias = w.tensor(f"{name}_bias", count, rows) if config.bias else None
    apart = torch.arange(rows).view(-1, len(names)).T.flatten()
    if bias is not None:
        bias = bias[:, apart.to(bias.device)].contiguous()
    matrix = w.quantized(name, count * rows, inputs)
    if matrix is None:
        dtype = _dtype_of(w, [name], outputs)
        values = w.stacked([name], [count], inputs, rows, dtype=dtype).transpose(1, 2)
        return values[:, apart.to(values.device)].contiguous(), bias
    order = (torch.arange(count)[:, None] * rows + apart).flatten()
    matrix = selected(matrix, order.to(matrix.codes.device))
    if w.quantization == "auto":
        return matrix, bias
    _note(w, str(matrix))
    values = torch.empty(count * rows, inputs, dtype=w.dtype, device=w.device)
    write(matrix, values)
    return values.view(count, rows, inputs), bias


def _note(w: WeightSource, kinds: str) -> None:
    dtype = str(w.dtype).removeprefix("torch.")
    w.note(f"experts of {kinds}: dequantised to {dtype} as they are loaded")
