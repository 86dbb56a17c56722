"""Heads of sizes without kernels: zeros behind their numbers make them larger. No torch."""

from collections.abc import Sequence
from dataclasses import replace

from slipstream.models.axes import OF_HEADS, QkNorms
from slipstream.models.model_config import ModelConfig
from slipstream.models.transforms import with_changes


def with_heads_of(config: ModelConfig, sizes: Sequence[int]) -> ModelConfig:
    """Return the model with heads of the least of `sizes` that holds its own.

    Rows of q, k and v, and columns of the output, are zero there: scores and results stay what they
    were, while cache and attention take what the larger size takes. A model whose size is one of
    them, is above all, or whose heads are normalised all together, or late, stays as it is.
    """
    size = config.dims.head_size
    larger = [each for each in sizes if each >= size]
    is_whole = config.axes.qk_norms not in (QkNorms.NONE, *OF_HEADS) or config.axes.late_norms
    if not larger or min(larger) == size or is_whole:
        return config
    padded, axes = min(larger), config.axes
    if config.build is not None:  # it pads what its layers pass to attention
        return replace(config, dims=replace(config.dims, head_size=padded))
    scale = size**-0.5 if axes.attention_scale is None else axes.attention_scale
    rotated = [size if rope.rotated is None else rope.rotated for rope in config.ropes]
    ropes = zip(config.ropes, rotated, strict=True)
    return replace(
        config,
        dims=replace(config.dims, head_size=padded),
        axes=replace(axes, attention_scale=scale, normed_size=size),
        ropes=tuple(replace(rope, rotated=count) for rope, count in ropes),
        tensors=with_changes(config.tensors, config.dims, config.ropes, axes.interleaved, padded),
    )
