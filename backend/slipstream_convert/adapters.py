"""Adapters as TensorRT-LLM's clients send them, from PEFT's directories and back.

The arrays are those of its converter: `lora_weights` fp16 `[1, rows, widest]` and `lora_config` i32
`[1, rows, 3]`, a row for each module with A and B flattened, B times the scaling.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from slipstream.errors import CheckpointError, ConfigError
from slipstream.fuse.adapt import adapt
from slipstream.layers.adapted import StepGroups
from slipstream.layers.decoder import Decoder
from slipstream.models.adapters.config import PromptConfig, read_config
from slipstream.models.adapters.folder import AdapterFolder
from slipstream.models.adapters.legacy import MODULES, end_of, parts_of, rows_of, sides_of
from slipstream.models.adapters.read import FILE, read_adapter, tensors_of
from slipstream.models.adapters.stored import Stored, modules_of, read_piece
from slipstream.models.adapters.targets import Part, Targets
from slipstream.models.decoder import build_any
from slipstream.models.files import header_entries
from slipstream.models.hf import read_config as read_model
from slipstream.models.source import Weights
from slipstream.models.weights import ShapeSource
from slipstream_contract.lora import COLUMNS, LoraTask
from torch import Tensor

WEIGHTS, CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
_META = torch.device("meta")
_NUMBERS = {names[0]: number for number, names in MODULES.items() if len(names) == 1}


class _Term(NamedTuple):
    """A and B of a module, B times the scaling."""

    a: Tensor
    b: Tensor


def to_arrays(directory: Path, output: Path, checkpoint: Path) -> int:
    """Write a PEFT directory as arrays; return the number of rows.

    Raises `CheckpointError` for what the arrays have no place for.
    """
    path, targets = directory / FILE, targets_of(checkpoint)
    read_adapter(directory, targets, torch.float32)  # all that makes it no adapter of the model
    with AdapterFolder(directory) as folder, tensors_of(folder) as file:
        config = read_config(folder)
        if isinstance(config, PromptConfig):
            raise CheckpointError(f"{directory}: virtual tokens go into prompt_embedding_table")
        if config.parameters:
            raise CheckpointError(f"{directory}: the arrays have no place for target_parameters")
        modules = modules_of(header_entries(file, path), path)
        read = read_piece(modules, config, file, path)
        found = [_row(stored, targets, path) for stored in read.stored]
    found.sort(key=lambda row: row[0])
    widest = max(len(numbers) for _, numbers in found)
    weights = np.zeros((1, len(found), widest), np.float16)
    for place, (_, numbers) in zip(weights[0], found, strict=True):
        place[: len(numbers)] = numbers.half().numpy()
    if not np.isfinite(weights).all():
        raise CheckpointError(f"{path}: B, times the scaling, has values beyond float16")
    _make(output)
    np.save(output / WEIGHTS, weights)
    order = [(module, layer, rank) for (layer, module, rank), _ in found]
    np.save(output / CONFIG, np.array([order], np.int32))
    return len(found)


def _row(stored: Stored, targets: Targets, path: Path) -> tuple[tuple[int, int, int], Tensor]:
    """Return layer, module's id and rank, and the numbers of a row."""
    parts = targets.parts(stored.module)
    name = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", parts[0].name if len(parts) == 1 else "")
    number = None if name is None else _NUMBERS.get(name[2])
    is_plain = stored.a is not None and stored.b is not None and stored.magnitude is None
    if name is None or number is None or not is_plain or parts[0].is_changed:
        raise CheckpointError(
            f"{path}: {stored.module}: the arrays have terms of q, k, v, o, gate, up and down as "
            "the checkpoint has these matrices, without magnitudes"
        )
    if (
        number == _NUMBERS["mlp.up_proj"]
        and targets.of_decoder(int(name[1]), "mlp.gate_proj") is None
    ):
        number = _NUMBERS["mlp.gate_proj"]  # of an MLP without a gate
    assert stored.a is not None
    assert stored.b is not None
    numbers = torch.cat([stored.a.float().flatten(), (stored.b.float() * stored.scale).flatten()])
    return (int(name[1]), number, stored.rank), numbers


def to_directory(arrays: Path, output: Path, checkpoint: Path) -> int:
    """Write arrays as a PEFT directory; return the number of modules. Raises `CheckpointError`."""
    found = dict(_modules(_task(arrays), targets_of(checkpoint)))
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": x.contiguous()
        for module, term in found.items()
        for side, x in zip("AB", term, strict=True)
    }
    ranks = {module: len(term.a) for module, term in found.items()}
    rank = max(ranks.values())
    others = {f"^{re.escape(module)}$": each for module, each in ranks.items() if each != rank}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,  # B has the scaling
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted({module.rpartition(".")[2] for module in found}),
        "bias": "none",
    }
    _make(output)
    save_file(tensors, output / FILE, metadata={"format": "pt"})
    (output / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return len(found)


def _modules(task: LoraTask, targets: Targets) -> Iterator[tuple[str, _Term]]:
    """Yield the terms of each module by the checkpoint's name of it."""
    for row in rows_of(task):
        parts = parts_of(row, targets)
        numbers = torch.from_numpy(row.numbers[: end_of(row, parts)].copy())
        for part, sides in zip(parts, sides_of(numbers, row.rank, parts), strict=True):
            yield _stored(part), _Term(*sides)


def _stored(part: Part) -> str:
    return part.names.stored(f"{part.name}.weight").removesuffix(".weight")


def _task(folder: Path) -> LoraTask:
    """Read both files. Raises `CheckpointError`."""
    weights, config = (_array(folder / name) for name in (WEIGHTS, CONFIG))
    shapes = weights.ndim == config.ndim == 2 and len(weights) == len(config) > 0
    if not shapes or config.shape[1] != COLUMNS:
        raise CheckpointError(
            f"{folder}: {WEIGHTS} is {list(weights.shape)} and {CONFIG} {list(config.shape)}, not "
            f"[rows, numbers] and [rows, {COLUMNS}]"
        )
    halves, integers = weights.astype(np.float16), config.astype(np.int32)
    rows, width = halves.shape
    return LoraTask(1, rows, width, halves.tobytes(), integers.tobytes())


def _array(path: Path) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    try:
        with path.open("rb") as file:
            found: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
            found = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return found[0] if found.ndim == COLUMNS and len(found) == 1 else found


def targets_of(checkpoint: Path) -> Targets:
    """Return what adapters of a checkpoint can change; no weights are read."""
    model = read_model(checkpoint)
    weights = Weights(ShapeSource(checkpoint, model.tensors), _META, torch.float32)
    decoder = build_any(model, weights, max_model_len=1)
    if not isinstance(decoder, Decoder):
        raise CheckpointError(f"{checkpoint}: {model.architecture} has no adapters here")
    places = adapt(decoder, StepGroups(), model.dims.vocab_size)
    return Targets(places, model.tensors, torch.float32, _META)


def _make(output: Path) -> None:
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output}: is there already, and not empty")
    output.mkdir(parents=True, exist_ok=True)


def convert(source: Path, output: Path, checkpoint: Path) -> str:
    """Write arrays for a PEFT directory, or the other way round; return what was written."""
    if (source / WEIGHTS).is_file():
        return f"{output}: PEFT's directory, {to_directory(source, output, checkpoint)} modules"
    return f"{output}: {WEIGHTS} and {CONFIG}, {to_arrays(source, output, checkpoint)} rows"
