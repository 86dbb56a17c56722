"""Read the tensors of `pytorch_model.bin`, in shards or alone, or of an adapter, without running a
pickle's code.

torch's loader of weights alone unpickles tensors and plain containers and refuses everything else
before it is made (https://docs.pytorch.org/docs/stable/notes/serialization.html). A file in torch's
zip format is mapped, so that a shard takes no memory until its tensors are read.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from slipstream.errors import CheckpointError
from slipstream.models.files import read_json
from slipstream.models.lfs import check_fetched
from slipstream_contract.errors import clip
from torch import Tensor

INDEX, SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
ADAPTER = "adapter_model.bin"  # of PEFT before 0.7
_PICKLED = (".bin", ".pt", ".pth")
_MOST_NAMES = 8  # of files, in an error
_RESERVED = "__metadata__"  # of safetensors' header
# What safetensors holds and the engine reads.
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
_DTYPES |= {torch.int64, torch.int32, torch.int16, torch.int8}
_DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2}


def pickled_files(directory: Path) -> list[Path]:
    """Return the files that hold the checkpoint's tensors; raises `CheckpointError`."""
    if (directory / INDEX).is_file():
        return [directory / name for name in sorted(set(_weight_map(directory).values()))]
    for name in (SINGLE, ADAPTER):
        if (directory / name).is_file():
            return [directory / name]
    raise _without(directory)


def _without(directory: Path) -> CheckpointError:
    """Return the error of a directory without the files that are read, with pickles that it has."""
    pickles = sorted(each.name for each in directory.iterdir() if each.suffix in _PICKLED)
    shards = [name for name in pickles if name.startswith(Path(SINGLE).stem)]
    named = shards or pickles
    shown = ", ".join(map(clip, named[:_MOST_NAMES]))
    if len(named) > _MOST_NAMES:
        shown += f" and {len(named) - _MOST_NAMES} more"
    if shards:
        return CheckpointError(f"{directory}: {INDEX} is missing, which names the shards: {shown}")
    others = f"; {shown} is not read" if shown else ""
    return CheckpointError(f"{directory}: has neither {SINGLE} nor {INDEX} nor {ADAPTER}{others}")


def _weight_map(directory: Path) -> dict[str, str]:
    """Return which file has which tensor, as the index says."""
    index = directory / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {clip(name)} is not a file name")
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: no such file, but {INDEX} names it")
    return weight_map


def shards(directory: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file by name; raises `CheckpointError` for what is wrong in one."""
    found: dict[str, str] = {}
    for path in pickled_files(directory):
        tensors = _tensors(path)
        for name in tensors:
            if name in found:
                raise CheckpointError(f"{path}: tensor {clip(name)} is also in {found[name]}")
            found[name] = path.name
        yield tensors
    if (directory / INDEX).is_file():
        for name, file in _weight_map(directory).items():
            if found.get(name) != file:
                raise CheckpointError(
                    f"{directory / file}: no tensor {clip(name)}, but {INDEX} says so"
                )


def _tensors(path: Path) -> dict[str, Tensor]:
    content = _load(path)
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path}: holds {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"{path}: {clip(name)} is of type {kind}, not a named tensor")
        if value.is_meta:
            raise CheckpointError(f"{path}: tensor {clip(name)} is of device meta: no data")
        if value.layout is not torch.strided or value.dtype not in _DTYPES:
            known = ", ".join(sorted(str(each).removeprefix("torch.") for each in _DTYPES))
            raise CheckpointError(
                f"{path}: tensor {clip(name)} is {value.dtype}, {value.layout}; dense ones of "
                f"{known} are read"
            )
        if value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: tensor {clip(name)} is {list(value.shape)}, {value.nbytes} bytes, of "
                f"{value.untyped_storage().nbytes()} that are there"
            )
    if _RESERVED in content:
        raise CheckpointError(f"{path}: {_RESERVED} is no name that a tensor may have")
    return content


def _load(path: Path) -> object:
    """Unpickle tensors and containers of them; nothing else is ever made."""
    with path.open("rb") as file:
        start = file.read(8)
    check_fetched(path, start)
    is_zip = start.startswith(b"PK\x03\x04")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # of many types, by what the file holds
        raise CheckpointError(f"{path}: cannot be read as tensors: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the sentence of torch's error that says what was met, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    if isinstance(error, KeyError | IndexError):  # of the unpickler's tables, by a byte's number
        lines = [f"it is no pickle ({type(error).__name__}: {error})"]
    reason = (named or lines or [f"it ends too early ({type(error).__name__})"])[0]
    return reason.partition(". ")[0][:200]
