"""Map the tensors of a class of transformers to those of checkpoints, as transformers itself does.

Some classes have the matrices of all experts in one, where checkpoints have one for each expert,
and some call tensors otherwise. What a class keeps in float32 beside weights of 16 bits is read so.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from slipstream.models.source import Weights


def _is_merged(each: WeightConverter) -> bool:
    """Return whether matrices of experts are put under one another, of gates and ups by turns."""
    first, *others = each.operations
    joins = [type(x) is Concatenate and x.dim == 1 for x in others]
    is_one = len(each.target_patterns) == 1 and len(joins) == (len(each.source_patterns) > 1)
    has_numbers = all(pattern.count("*") == 1 for pattern in each.source_patterns)
    return (
        type(first) is MergeModulelist and first.dim == 0 and all(joins) and is_one and has_numbers
    )


def is_read(model: Any) -> bool:
    """Return whether all that checkpoints have becomes the class' tensors in ways known here."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return all(_is_merged(each) for each in conversions if isinstance(each, WeightConverter))


class StoredNames:
    """Reads the tensors of a class by the names that checkpoints have for them."""

    def __init__(self, model: Any, weights: Weights) -> None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        self._weights = weights
        self._merged = {
            each.target_patterns[0]: tuple(each.source_patterns)
            for each in conversions
            if isinstance(each, WeightConverter)
        }
        self._renamed = [
            (target, source.replace("\\.", "."))
            for each in conversions
            if isinstance(each, WeightRenaming)
            for target, source in zip(each.target_patterns, each.source_patterns, strict=False)
        ]
        kept = set(model._keep_in_fp32_modules_strict)
        kept |= model._keep_in_fp32_modules if weights.dtype == torch.float16 else set()
        self._wide = [re.compile(rf"(?:^|\.)(?:{each})(?:$|\.)") for each in kept]

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the class' tensor, or its first expert's matrix."""
        return any(map(self._weights.has, (*self._names(name), *self._experts(name, 1))))

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """Read a tensor; raises `CheckpointError` for one that is missing or has another shape."""
        dtype = torch.float32 if any(each.search(name) for each in self._wide) else None
        experts = list(self._experts(name, shape[0])) if len(shape) == 3 else []
        if experts:
            rows = shape[0] * shape[1] // len(experts)
            read = self._weights.stacked(experts, [rows] * len(experts), shape[2], dtype=dtype)
            return read.view(shape)
        own = next(filter(self._weights.has, self._names(name)), name)
        return self._weights.stacked([own], shape[:1], *shape[1:], dtype=dtype)

    def _names(self, name: str) -> Iterable[str]:
        """Yield the name of a tensor, and others that a checkpoint may have for it."""
        yield name
        for target, source in self._renamed:
            if target in name:
                yield name.replace(target, source)

    def _experts(self, name: str, count: int) -> Iterable[str]:
        """Yield the names of matrices of `count` experts that the class has in one, if they are."""
        for each in self._names(name):
            for target, sources in self._merged.items():
                stem = each.removesuffix(target)
                if stem != each and self._weights.has(stem + sources[0].replace("*", "0")):
                    for i in range(count):
                        yield from (stem + source.replace("*", str(i)) for source in sources)
