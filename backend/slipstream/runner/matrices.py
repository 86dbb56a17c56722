"""The matrices of a checkpoint's model, as its layers pack and fuse them; no weights are read.

A model is built of tensors without data, in the place of those of a device that need not be there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.fuse.rewrite import Place, places
from slipstream.kernels.elementwise.eight_bits import E4M3, PRODUCTS
from slipstream.kernels.gemm.cpu_packing import LAYOUT
from slipstream.kernels.gemm.op import Matrix, Spec
from slipstream.kernels.gemm.packing import CodeType, Packing
from slipstream.kernels.runtime.registry import Target
from slipstream.layers.decoder import Decoder, StepDecoder
from slipstream.layers.embedding import Head, Table
from slipstream.layers.experts import Experts
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd
from slipstream.layers.norm import LayerNorm, Norm
from slipstream.layers.stages import Inlet
from slipstream.models.decoder import build_any
from slipstream.models.fileless import SizeSource
from slipstream.models.model_config import ModelConfig
from slipstream.models.source import Source, Weights
from slipstream.models.weights import ShapeSource
from slipstream.quant.row_forms import Factored

META = torch.device("meta")
_PACKAGE = "slipstream."


@dataclass(frozen=True, slots=True)
class Weight:
    """Weights that a step multiplies with; equal ones of several layers are one."""

    name: str  # of the place in its layer
    scheme: str
    outputs: int
    inputs: int
    dtype: torch.dtype  # of the weights; of packed ones, of the words that they lie in
    model_dtype: torch.dtype
    norm: str  # before the product: "", "norm", "norm plus one"
    bias: bool
    gate: str
    adds: bool  # to the residual sum
    packing: Packing | None = None  # of packed weights
    count: int = 1  # of such in the model

    def spec(self, rows: int, target: Target) -> Spec:
        """Say what the product with so many rows is to a GEMM; rows are aligned."""
        packing = self.packing
        is_e2m1 = packing is not None and packing.code_type == "e2m1" and packing.layout != LAYOUT
        return Spec(
            rows=rows,
            inputs=self.inputs,
            outputs=self.outputs,
            x=self.model_dtype,
            weight=self.dtype,
            out=self.model_dtype,
            norm=self.norm,
            scales="columns" if is_e2m1 or self.dtype in PRODUCTS else "",
            bias=self.bias,
            gate=self.gate,
            residual=self.adds,
            x_aligned=True,
            x_pitch=self.inputs * self.model_dtype.itemsize % 16 == 0,
            weight_aligned=True,
            norm_aligned=True,
            target=target,
            packing=self.packing,
        )

    @property
    def dense_dtype(self) -> torch.dtype:
        """The dtype of what a GEMM without packed weights multiplies with."""
        return self.dtype if self.packing is None else self.model_dtype

    @property
    def kind(self) -> str:
        """How the weights are kept, in words."""
        if self.packing is not None:
            return str(self.packing)
        return str(self.dtype).removeprefix("torch.")


def weights_of(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, target: Target
) -> list[Weight]:
    """List them in the order of a step; raises `CheckpointError` as loading would."""
    return counted(built(config, model, dtype, target), dtype)


def counted(decoder: StepDecoder, dtype: torch.dtype) -> list[Weight]:
    """List the weights of a decoder in the order of a step; none, where they are not ours."""
    if not isinstance(decoder, Decoder):
        return []
    found = tensors_of(decoder, dtype)
    return [replace(weight, count=len(tensors)) for weight, tensors in found.items()]


def experts_of(decoder: StepDecoder) -> list[Experts]:
    """List the layers of experts of a decoder."""
    return [each for each in _objects(decoder) if isinstance(each, Experts)]


def tensors_of(decoder: Decoder, dtype: torch.dtype) -> dict[Weight, list[Tensor | None]]:
    """Return the values of a decoder's matrices; None of a scheme with a form of its own."""
    norm = _norm_kind(decoder)
    found: dict[Weight, list[Tensor | None]] = {}
    for name, place in places(decoder):
        weights = place.linear.weights
        weights = weights.matrix if isinstance(weights, Factored) else weights
        values = weights.values if isinstance(weights, Matrix) else None
        found.setdefault(_weight(name, place, dtype, norm), []).append(values)
    return found


class PackedPart(NamedTuple):
    """Matrices that are packed in so many bits."""

    bits: int
    num_bytes: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class WeightParts:
    """Bytes of all weights as a target keeps them, and what of them is experts' and packed.

    num_bytes: of all.
    expert_bytes, expert_elements, expert_codes, num_expert_layers: of experts.
    rounded_experts: elements of those in e4m3 beside which a kernel may round rows, too.
    packed: matrices that are multiplied packed, the head with `has_packed_head` among them.
    rounded: elements of matrices that are multiplied with rows of their own 8 bits, by type.
    embedding_bytes: of the embedding, of which a step reads rows; 0 where it is the head, too.
    """

    num_bytes: int
    expert_bytes: int = 0
    expert_elements: int = 0
    expert_codes: tuple[int, CodeType] | None = None  # bits and type of packed ones
    num_expert_layers: int = 0
    packed: tuple[PackedPart, ...] = ()
    num_packed: int = 0  # matrices, not of experts
    rounded: tuple[tuple[torch.dtype, int], ...] = ()
    has_packed_head: bool = False
    embedding_bytes: int = 0
    rounded_experts: int = 0


def weight_bytes(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, target: Target
) -> int:
    """Count the bytes of all weights as a target keeps them: packed, dequantised or as they are."""
    return weight_parts(config, model, dtype, target).num_bytes


def weight_parts(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, target: Target
) -> WeightParts:
    """Count as `weight_bytes` does, experts and packed matrices apart."""
    decoder = built(config, model, dtype, target)
    found = list(_objects(decoder))
    embedding, head = _ends(decoder)
    alone = {id(each) for each in _objects(embedding)} - {id(each) for each in _objects(head)}
    layers = [each for each in found if isinstance(each, Experts)]
    matrices = [matrix for layer in layers for matrix in (layer.gate_up, layer.down)]
    packed = [
        (each, each.groups.packing)
        for each in found
        if isinstance(each, Matrix) and each.groups is not None and id(each) not in alone
    ]
    return WeightParts(
        _num_bytes(found),
        _num_bytes(_objects(matrices)),
        sum(len(each.values) * each.outputs * each.inputs for each in matrices),
        max(map(_codes, (each.groups.packing for each in matrices if each.groups)), default=None),
        len(layers),
        tuple(
            PackedPart(
                bits,
                _num_bytes(_objects([matrix for matrix, each in packed if each.bits == bits])),
                sum(each.outputs * each.inputs for _, each in packed if each.bits == bits),
            )
            for bits in sorted({packing.bits for _, packing in packed})
        ),
        len(packed),
        tuple(_rounded(found).items()),
        head is not None and head.matrix.groups is not None,
        _num_bytes(each for each in _objects(embedding) if id(each) in alone),
        sum(each.values.numel() for each in matrices if each.values.dtype == E4M3),
    )


def _rounded(found: Iterable[object]) -> dict[torch.dtype, int]:
    """Count elements of matrices whose rows are rounded to 8 bits, too, by type."""
    counts = dict.fromkeys(PRODUCTS, 0)
    for each in found:
        if isinstance(each, Matrix) and each.groups is None and each.values.dtype in counts:
            counts[each.values.dtype] += each.values.numel()
    return {dtype: count for dtype, count in counts.items() if count}


def _ends(decoder: StepDecoder) -> tuple[Table | None, Head | None]:
    """Return the embedding's rows and the head of a family's decoder, of a stage that has them."""
    if not isinstance(decoder, Decoder) or isinstance(decoder.embedding, Inlet):
        return None, None
    return decoder.embedding.table, decoder.head


def _codes(packing: Packing) -> tuple[int, CodeType]:
    return packing.bits, packing.code_type


def _num_bytes(parts: Iterable[object]) -> int:
    """Return the bytes of the storages of tensors, which views and tied matrices share."""
    storages = [each.untyped_storage() for each in parts if isinstance(each, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _objects(root: object) -> Iterator[object]:
    """List what an object of this package consists of, each part once."""
    todo: list[object] = [root]
    seen: dict[int, object] = {}  # alive, so that no other object gets its address
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        yield each
        if isinstance(each, list | tuple):
            todo.extend(each)
        elif type(each).__module__.startswith(_PACKAGE):
            names = [name for of in type(each).__mro__ for name in getattr(of, "__slots__", ())]
            names.extend(getattr(each, "__dict__", ()))
            todo.extend(getattr(each, name, None) for name in names)


def built(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, target: Target
) -> StepDecoder:
    """Return the model of a checkpoint, of tensors without data, in the place of a target's."""
    source: Source = SizeSource()
    if config.load_format != "random":
        source = ShapeSource(Path(config.checkpoint), model.tensors)
    weights = Weights(source, META, dtype, config.quantization, target=target)
    return build_any(model, weights, max_model_len=1)


def _norm_kind(decoder: Decoder) -> str:
    """Return the norm that GEMMs may fuse, as their specs call it; "": they fuse none."""
    if isinstance(decoder.norm, LayerNorm):
        return "layer norm" if decoder.norm.is_plain else ""
    if not isinstance(decoder.norm, Norm):
        return ""
    return "norm plus one" if decoder.norm.plus_one else "norm"


def _weight(name: str, place: Place, dtype: torch.dtype, norm: str) -> Weight:
    adds = isinstance(place, LinearAdd)
    found = linear_weight(name, place.linear, dtype)
    if isinstance(place.linear.weights, Factored):
        return found
    gate = place.gate if isinstance(place, GatedLinear) else ""
    return replace(found, norm="" if adds else norm, gate=gate, adds=adds)


def linear_weight(name: str, linear: Linear, dtype: torch.dtype, count: int = 1) -> Weight:
    """Return the weights of a linear layer that nothing is fused with."""
    weights = linear.weights
    weights = weights.matrix if isinstance(weights, Factored) else weights
    matrix = weights if isinstance(weights, Matrix) else None
    packing = None if matrix is None or matrix.groups is None else matrix.groups.packing
    outputs, inputs = (0, 0) if matrix is None else matrix.values.shape
    return Weight(
        name=name,
        scheme=linear.scheme.name,
        outputs=outputs if packing is None else packing.outputs,
        inputs=inputs if packing is None else packing.inputs,
        dtype=dtype if matrix is None else matrix.values.dtype,
        model_dtype=dtype,
        norm="",
        bias=linear.bias is not None,
        gate="",
        adds=False,
        packing=packing,
        count=count,
    )
