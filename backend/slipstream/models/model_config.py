"""A checkpoint's configuration, read. No torch."""

from dataclasses import dataclass

from slipstream.layers.dims import Dims, RopeConfig
from slipstream.models.axes import Axes, TensorNames


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder is built from; all of it honoured."""

    architecture: str
    dims: Dims
    axes: Axes
    tensors: TensorNames
    rope: RopeConfig
    local_rope: RopeConfig  # of layers with a window
    windows: tuple[int, ...]  # of layers: how many tokens a query sees, itself included; 0: all
    max_positions: int
    ties_embeddings: bool
    dtype: str | None  # the checkpoint's own, if config.json says
    eos_ids: tuple[int, ...]
    fp8_cache: bool  # whether the checkpoint says that its cache is to be e4m3
    ignored: tuple[str, ...]  # keys of config.json that change nothing, here or in transformers
