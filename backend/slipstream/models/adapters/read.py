"""Read a PEFT directory: `A` and `B` of each module, as terms of the decoder's places.

Tensors have the checkpoint's names of modules, `base_model.model.MODULE.lora_A.weight`. What the
decoder changes of a checkpoint's matrices as it loads them, it changes of an adapter's: rows of B
(q, k and v that lie in one matrix, pairs that rotate), or columns of A (padded heads).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from slipstream_contract.errors import clip
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.layers.adapted import Term
from slipstream.models.adapters.config import MAX_RANK, LoraConfig, read_config
from slipstream.models.adapters.targets import Part, Targets
from slipstream.models.entries import TensorEntry
from slipstream.models.files import tensor_entries

FILE = "adapter_model.safetensors"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.(weight|bias)")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter in host memory: its terms by the decoder's places, in the model's dtype."""

    terms: Mapping[str, tuple[Term, ...]]
    digest: bytes  # of tensors and scalings
    rank: int  # the largest
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Pair:
    """The stored tensors of a module."""

    module: str
    a: Tensor  # [r, inputs], as stored
    b: Tensor  # [outputs, r]
    scale: float


def read_adapter(directory: Path, targets: Targets, dtype: torch.dtype) -> AdapterWeights:
    """Read and check an adapter; raises `CheckpointError` (file, tensor or key, value)."""
    config = read_config(directory)
    entries = tensor_entries(directory, FILE)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    terms: dict[str, list[Term]] = {}
    rank = 0
    for pair in _pairs(entries, config, directory / FILE):
        digest.update(f"{pair.module} {pair.scale!r}".encode())
        for x in (pair.a, pair.b):
            digest.update(f" {x.dtype} {tuple(x.shape)} ".encode())
            digest.update(x.view(torch.uint8).numpy().data)
        rank = max(rank, len(pair.a))
        b = pair.b.float() * pair.scale
        for part in _parts(targets, pair, directory / FILE):
            term = _term(part, pair, b, directory / FILE)
            terms.setdefault(part.place, []).append(
                Term(part.first, *(x.to(dtype).contiguous() for x in term))
            )
    if not terms:
        raise CheckpointError(f"{directory / FILE}: it has no tensors: an adapter of nothing")
    check_range(terms, dtype, directory / FILE)
    num_bytes = sum(t.a.nbytes + t.b.nbytes for found in terms.values() for t in found)
    made = {place: joined(found) for place, found in terms.items()}
    return AdapterWeights(made, digest.digest(), rank, num_bytes)


def _pairs(entries: Mapping[str, TensorEntry], config: LoraConfig, path: Path) -> Iterator[_Pair]:
    """Yield what the file has of each module, by their names."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{path}: tensor {clip(name, 128)} is none of a LoRA's")
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is {entry.dtype}: not implemented")
        found.setdefault(match[1], {})[f"{match[2]}.{match[3]}"] = entry
    memory = torch.from_numpy(np.fromfile(path, np.uint8))
    for module, own in sorted(found.items()):
        if (extra := own.keys() - {"A.weight", "B.weight"}) and any(
            _tensor(memory, own[key]).count_nonzero() for key in extra
        ):
            raise CheckpointError(f"{path}: {module} has a bias (lora_bias): not implemented")
        for key in ("A.weight", "B.weight"):
            if key not in own:
                raise CheckpointError(f"{path}: tensor {module}.lora_{key} is missing")
        a, b = (_tensor(memory, own[key]) for key in ("A.weight", "B.weight"))
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise CheckpointError(f"{path}: {module}: A and B are {shapes}: no rank fits both")
        rank, wanted = len(a), config.rank_of(module)
        if rank != wanted or not 1 <= rank <= MAX_RANK:
            raise CheckpointError(
                f"{path}: {module} has rank {rank}, but adapter_config.json says {wanted} "
                f"(1 to {MAX_RANK} are served)"
            )
        yield _Pair(module, a, b, config.scale_of(module, rank))


def _tensor(memory: Tensor, entry: TensorEntry) -> Tensor:
    part = memory[entry.begin : entry.end].clone()  # aligned
    return part.view(_DTYPES[entry.dtype]).view(entry.shape)


def _parts(targets: Targets, pair: _Pair, path: Path) -> list[Part]:
    parts = targets.parts(pair.module)
    if not parts:
        raise CheckpointError(
            f"{path}: module {clip(pair.module, 128)} is none that adapters change here: "
            f"{targets.kinds} of the {targets.num_layers} layers are"
        )
    return parts


def _term(part: Part, pair: _Pair, b: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    """Return A and B of a part of a module, as the decoder has its matrix."""
    try:
        a, b = part.of_a(pair.a), part.of_b(b)
    except (RuntimeError, IndexError):  # a view of other sizes
        a, b = pair.a, b[:0]
    rank = len(pair.a)
    if a.shape != (rank, part.inputs) or b.shape != (part.outputs, rank):
        raise CheckpointError(
            f"{path}: {pair.module}: A is {list(pair.a.shape)} and B {list(pair.b.shape)}, which "
            f"give no {part.outputs} outputs of {part.inputs} inputs"
        )
    return a, b


def check_range(terms: Mapping[str, list[Term]], dtype: torch.dtype, path: Path | str) -> None:
    """Refuse numbers that are not finite in the model's dtype."""
    for place, found in terms.items():
        for name, x in (pair for term in found for pair in (("A", term.a), ("B", term.b))):
            if not x.isfinite().all():
                raise CheckpointError(
                    f"{path}: {place}: {name}, times the scaling, holds NaN, infinity or values "
                    f"beyond {str(dtype).removeprefix('torch.')}"
                )


def joined(terms: list[Term]) -> tuple[Term, ...]:
    """Join terms of neighbouring outputs that share their A: those of a fused module."""
    out: list[Term] = []
    for term in sorted(terms, key=lambda term: term.first):
        last = out[-1] if out else None
        is_next = last is not None and last.first + len(last.b) == term.first
        if last is not None and is_next and torch.equal(last.a, term.a):
            out[-1] = Term(last.first, last.a, torch.cat([last.b, term.b]))
        else:
            out.append(term)
    return tuple(out)
