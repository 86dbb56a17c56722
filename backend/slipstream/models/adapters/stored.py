"""The tensors of an adapter's file by module: `base_model.model.MODULE.lora_A.weight` and more."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from slipstream_contract.errors import clip
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.adapters.config import MAX_RANK, LoraConfig, PromptConfig
from slipstream.models.adapters.patterns import MAX_NAME
from slipstream.models.entries import TensorEntry

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "rows_a",
    "lora_embedding_B": "rows_b",
    "lora_magnitude_vector": "magnitude",
    "lora_A.bias": "bias",
    "lora_B.bias": "bias",
    "base_layer.weight": "base",
    "weight": "whole",
}
_PROMPT = "prompt_embeddings"
_NAME = re.compile(rf"base_model\.model\.(.+?)\.({'|'.join(map(re.escape, _KINDS))})")


@dataclass(frozen=True, slots=True)
class Stored:
    """What the file has of a module.

    a, b: of its term, `[r, inputs]` and `[outputs, r]`; of an embedding's rows `[r, rows]` and
    `[width, r]`.
    scale: of the term.
    magnitude: of each output, if the adapter has such (DoRA).
    base: the module's own matrix, which PEFT may write beside terms of head and embedding.
    whole: a matrix that takes the place of the module's; then there is no term.
    """

    module: str
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    is_rows: bool = False
    magnitude: Tensor | None = None
    base: Tensor | None = None
    whole: Tensor | None = None

    @property
    def rank(self) -> int:
        """The term's; 0: there is none."""
        return 0 if self.a is None else len(self.a)

    def tensors(self) -> list[Tensor]:
        """Return those that say what is computed."""
        return [x for x in (self.a, self.b, self.magnitude, self.whole) if x is not None]


def stored_modules(
    entries: Mapping[str, TensorEntry],
    config: LoraConfig,
    file: BinaryIO,
    path: Path,
    most: int = 1 << 62,
) -> Iterator[Stored]:
    """Yield what a file has of each module, by their names; raises `CheckpointError`.

    `most`: numbers of a tensor. What an entry says is checked before its bytes are read.
    """
    found: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        match = _NAME.fullmatch(name)
        if match is None or len(match[1]) > MAX_NAME:
            raise CheckpointError(f"{path}: tensor {clip(name, 128)} is none of a LoRA's")
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is {entry.dtype}: not implemented")
        if math.prod(entry.shape) > most:
            raise CheckpointError(
                f"{path}: tensor {name} is {clip(list(entry.shape))}, more than the {most} numbers "
                f"that one of this model's has at most"
            )
        found.setdefault(match[1], {})[match[2]] = name
    for module, names in sorted(found.items()):
        own: dict[str, Tensor] = {}
        for kind, name in names.items():
            own[_KINDS[kind]] = x = _tensor(file, entries[name])
            if _KINDS[kind] == "bias" and x.count_nonzero():
                raise CheckpointError(f"{path}: {module} has a bias (lora_bias): not implemented")
        yield _stored(module, own, config, path)


def stored_prompt(
    entries: Mapping[str, TensorEntry], config: PromptConfig, file: BinaryIO, path: Path
) -> Tensor:
    """Return the rows of prompt tuning, `[tokens, width]`; raises `CheckpointError`."""
    if set(entries) != {_PROMPT}:
        others = sorted(set(entries) - {_PROMPT})
        raise CheckpointError(
            f"{path}: tensor {clip(others[0], 128)} is none of prompt tuning's"
            if others
            else f"{path}: tensor {_PROMPT} is missing"
        )
    entry = entries[_PROMPT]
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {_PROMPT} is {entry.dtype}: not implemented")
    if list(entry.shape) != [config.num_tokens, config.width]:
        raise CheckpointError(
            f"{path}: tensor {_PROMPT} is {clip(list(entry.shape))}, but adapter_config.json says "
            f"{[config.num_tokens, config.width]}"
        )
    return _tensor(file, entry)


def _tensor(file: BinaryIO, entry: TensorEntry) -> Tensor:
    memory = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    file.seek(entry.begin)
    if file.readinto(memory.numpy().data) != len(memory):  # type: ignore[attr-defined]
        raise CheckpointError(f"{entry.file}: it became shorter while it was read")
    return memory.view(_DTYPES[entry.dtype]).view(entry.shape)


def _stored(module: str, own: dict[str, Tensor], config: LoraConfig, path: Path) -> Stored:
    is_rows = "rows_a" in own or "rows_b" in own
    side_a, side_b = ("rows_a", "rows_b") if is_rows else ("a", "b")
    if own.keys() == {"whole"}:
        if module.rpartition(".")[2] not in config.whole:
            raise CheckpointError(
                f"{path}: tensor {module}.weight is a whole matrix, but modules_to_save of "
                f"adapter_config.json does not name it"
            )
        return Stored(module, whole=own["whole"])
    allowed = {side_a, side_b, "bias", "base", *(["magnitude"] if config.has_magnitudes else [])}
    if extra := own.keys() - allowed:
        raise CheckpointError(f"{path}: {module} has {sorted(extra)[0]} beside a term: no such is")
    for key, name in ((side_a, "A"), (side_b, "B")):
        if key not in own:
            kind = f"lora_embedding_{name}" if is_rows else f"lora_{name}.weight"
            raise CheckpointError(f"{path}: tensor {module}.{kind} is missing")
    if config.has_magnitudes and "magnitude" not in own:
        raise CheckpointError(f"{path}: tensor {module}.lora_magnitude_vector is missing")
    a, b = own[side_a], own[side_b]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise CheckpointError(f"{path}: {module}: A and B are {shapes}: no rank fits both")
    rank, wanted = len(a), config.rank_of(module)
    if rank != wanted or not 1 <= rank <= MAX_RANK:
        raise CheckpointError(
            f"{path}: {module} has rank {rank}, but adapter_config.json says {wanted} "
            f"(1 to {MAX_RANK} are served)"
        )
    magnitude = own.get("magnitude")
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        raise CheckpointError(
            f"{path}: {module}.lora_magnitude_vector is {list(magnitude.shape)}, not "
            f"{list(b.shape[:1])}"
        )
    scale = config.scale_of(module, rank)
    return Stored(module, a, b, scale, is_rows, magnitude, own.get("base"))
