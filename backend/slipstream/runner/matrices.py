"""The matrices of a checkpoint's model, as its layers pack and fuse them; no weights are read."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slipstream.config import EngineConfig
from slipstream.fuse.rewrite import Place, places
from slipstream.kernels.gemm.op import E4M3, Matrix, Spec
from slipstream.kernels.runtime.registry import Target
from slipstream.layers.decoder import Decoder
from slipstream.layers.linear import GatedLinear, LinearAdd
from slipstream.layers.norm import Norm
from slipstream.models.decoder import build
from slipstream.models.model_config import ModelConfig
from slipstream.models.weights import ShapeSource, SizeSource, Source, Weights

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Weight:
    """Weights that a step multiplies with; equal ones of several layers are one."""

    name: str  # of the place in its layer
    scheme: str
    outputs: int
    inputs: int
    dtype: torch.dtype  # of the weights
    model_dtype: torch.dtype
    norm: str  # before the product: "", "norm", "norm plus one"
    bias: bool
    gate: str
    adds: bool  # to the residual sum
    count: int = 1  # of such in the model

    def spec(self, rows: int, target: Target) -> Spec:
        """Say what the product with so many rows is to a GEMM; rows are aligned."""
        is_scaled = self.dtype == E4M3
        return Spec(
            rows=rows,
            inputs=self.inputs,
            outputs=self.outputs,
            x=self.model_dtype,
            weight=self.dtype,
            out=self.model_dtype,
            norm=self.norm,
            scales="columns" if is_scaled else "",
            bias=self.bias,
            gate=self.gate,
            residual=self.adds,
            x_aligned=True,
            x_pitch=self.inputs * self.model_dtype.itemsize % 16 == 0,
            weight_aligned=True,
            norm_aligned=True,
            target=target,
        )


def weights_of(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> list[Weight]:
    """List them in the order of a step; raises `CheckpointError` as loading would."""
    source: Source = SizeSource()
    if config.load_format != "random":
        source = ShapeSource(Path(config.checkpoint), model.tensors)
    weights = Weights(source, META, dtype, config.quantization)
    decoder = build(model, weights, max_model_len=1)
    norm = _norm_kind(decoder)
    found: dict[Weight, int] = {}
    for name, place in places(decoder):
        weight = _weight(name, place, dtype, norm)
        found[weight] = found.get(weight, 0) + 1
    return [replace(weight, count=count) for weight, count in found.items()]


def _norm_kind(decoder: Decoder) -> str:
    """Return the norm that GEMMs may fuse, as their specs call it; "": they fuse none."""
    if not isinstance(decoder.norm, Norm):
        return ""
    return "norm plus one" if decoder.norm.plus_one else "norm"


def _weight(name: str, place: Place, dtype: torch.dtype, norm: str) -> Weight:
    linear, adds = place.linear, isinstance(place, LinearAdd)
    matrix = linear.weights if isinstance(linear.weights, Matrix) else None
    return Weight(
        name=name,
        scheme=linear.scheme.name,
        outputs=0 if matrix is None else matrix.values.shape[0],
        inputs=0 if matrix is None else matrix.values.shape[1],
        dtype=dtype if matrix is None else matrix.values.dtype,
        model_dtype=dtype,
        norm="" if adds else norm,
        bias=linear.bias is not None,
        gate=place.gate if isinstance(place, GatedLinear) else "",
        adds=adds,
    )
