"""Split a model over the stages of a pipeline: each has consecutive layers, with names of its own.

The first stage has both ends, embedding and head, too: the last one sends its states round to it.
So tied embeddings lie in one place, and what samples, with all that requests want of logits, runs
where the scheduler does. A head costs a step as much as some layers do, so the first stage has
fewer of those.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from slipstream.config import DEVICE_DRAFTERS, EngineConfig
from slipstream.core.groups import LayerGroups, group_layers, groups_of_stage
from slipstream.errors import ConfigError
from slipstream.models.axes import LayerRange
from slipstream.models.decoder import build_any
from slipstream.models.fileless import SizeSource
from slipstream.models.model_config import ModelConfig
from slipstream.models.sharding import check_is_ours
from slipstream.models.source import Weights

_LAYER = "model.layers."
_ENDS = ("lm_head.weight", "model.embed_tokens.weight")  # the first that a model has is its head
Bounds = Sequence[tuple[int, int]]  # the first layer of each stage, and the one behind its last
_Cut = tuple[float, float, tuple[int, ...]]


class Costs(NamedTuple):
    """What a step takes in each layer, and in the head: in one unit, elements or seconds."""

    layers: Sequence[float]
    head: float


@dataclass(frozen=True, slots=True)
class Staged:
    """A stage's part of a model: its configuration, and the tables of blocks of its layers."""

    model: ModelConfig
    groups: LayerGroups


def check_stages(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if stages cannot share the model: field, value and limit."""
    count = config.pipeline_parallel
    if count == 1:
        return
    asked = f"pipeline_parallel = {count}"
    check_is_ours(asked, config, model)
    if config.speculation in DEVICE_DRAFTERS:
        raise ConfigError(
            f"{asked} does not go with speculation = {config.speculation!r}: drafters on the "
            "device read states that lie on other stages; lookup, suffix and auto work"
        )
    if model.dims.num_layers < count:
        raise ConfigError(f"{asked}: num_hidden_layers = {model.dims.num_layers} is below it")


def staged(
    model: ModelConfig, stage: int, count: int, max_tokens: int, bounds: Bounds | None = None
) -> Staged:
    """Return the part of a stage, of `count`, that `check_stages` allows.

    `max_tokens` is the length of the longest sequence; `bounds` are the layers of the stages, None:
    by bytes. Tables of blocks are those of the whole model on every stage: one scheduler fills
    them.
    """
    groups = group_layers(model.windows, max_tokens)
    if count == 1:
        return Staged(model, groups)
    bounds = bounds or split(*costs_by_bytes(model), count)
    begin, end = bounds[stage]
    axes, windows = model.axes, model.windows
    dense = _own_layers(axes.dense_layers, begin, end)
    skips = axes.skips
    if skips is not None:
        skips = replace(skips, layers=_own_layers(skips.layers, begin, end))
    part = replace(
        model,
        dims=replace(model.dims, num_layers=end - begin),
        axes=replace(axes, dense_layers=dense, skips=skips),
        tensors=replace(model.tensors, layers=LayerRange(begin, end, len(windows), stage == 0)),
        ropes=model.ropes[begin:end],
        windows=windows[begin:end],
        stage=stage,
        num_stages=count,
        whole=model,
        stage_bounds=tuple(bounds),
    )
    return Staged(part, groups_of_stage(groups, windows, begin, end))


def _own_layers(layers: frozenset[int], begin: int, end: int) -> frozenset[int]:
    """Return those of the layers that a stage has, as it numbers them."""
    return frozenset(i - begin for i in layers if begin <= i < end)


def costs_by_bytes(model: ModelConfig) -> Costs:
    """Return what a step reads of layers and head: the elements of their matrices.

    Of an embedding a step reads a row a token.
    """
    elements = _elements_of(model)
    layers = [sum(of_layer.values()) for of_layer in _by_layer(model, elements)]
    return Costs(layers, next((elements[name] for name in _ENDS if name in elements), 0))


def kinds_of(model: ModelConfig) -> list[int]:
    """Return for each layer the first one that is like it: in matrices, rotation, what it sees."""
    firsts: dict[str, int] = {}
    skips = model.axes.skips
    seen = [(w, skips is not None and i in skips.layers) for i, w in enumerate(model.windows)]
    likes = zip(_by_layer(model, _elements_of(model)), model.ropes, seen, strict=True)
    return [firsts.setdefault(repr(like), layer) for layer, like in enumerate(likes)]


def _by_layer(model: ModelConfig, elements: dict[str, int]) -> list[dict[str, int]]:
    """Return the elements of each layer's matrices, by their names in the layer."""
    layers: list[dict[str, int]] = [{} for _ in range(model.dims.num_layers)]
    for name, count in elements.items():
        if name.startswith(_LAYER):
            number, _, rest = name.removeprefix(_LAYER).partition(".")
            layers[int(number)][rest] = count
    return layers


def _elements_of(model: ModelConfig) -> dict[str, int]:
    source = SizeSource()
    build_any(model, Weights(source, torch.device("meta"), torch.float32), max_model_len=1)
    return source.elements


def split(layers: Sequence[float], first: float, count: int) -> list[tuple[int, int]]:
    """Cut layers of these costs into `count` ranges, none empty; `first` is the first one's own.

    The largest sum of a range is least; of such cuts an even one is taken.
    """
    ends: list[float] = [0]
    for cost in layers:
        ends.append(ends[-1] + cost)

    # Of the first i layers in so many ranges: the largest sum, the squares of all, the ends.
    def joined(before: _Cut, sum_of_range: float, end: int) -> _Cut:
        largest, squares, found = before
        return max(largest, sum_of_range), squares + sum_of_range**2, (*found, end)

    best = {i: joined((0, 0, ()), first + ends[i], i) for i in range(1, len(layers) + 1)}
    for _ in range(count - 1):
        best = {
            i: min(joined(best[j], ends[i] - ends[j], i) for j in best if j < i)
            for i in range(min(best) + 1, len(layers) + 1)
        }
    return list(pairwise((0, *best[len(layers)][2])))
