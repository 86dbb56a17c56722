"""Write a checkpoint directory: shards, index, and the small files as they were or as given."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from slipstream.errors import ConfigError
from torch import Tensor

SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_NOT_COPIED = {"gguf.json", "hf_quant_config.json", INDEX, "pytorch_model.bin.index.json"}


class Writer:
    """Collects tensors and writes a shard whenever there are enough; `finish` names the shards.

    Everything is written beside `output` and moved there at the end.
    """

    def __init__(self, output: Path, shard_bytes: int = SHARD_BYTES) -> None:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise ConfigError(f"--output {output}: is there already, and not an empty directory")
        self._output = output
        self._folder = output.with_name(f".{output.name}.unfinished")
        self._limit = shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._size = 0
        self._shards: list[list[str]] = []
        self.num_bytes = 0
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def add(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Take tensors, on any device, as numbers of `dtype`; None: of their own."""
        for name, tensor in tensors.items():
            kept = dtype or tensor.dtype
            size = tensor.numel() * kept.itemsize
            if self._size and self._size + size > self._limit:
                self._write()
            self._waiting[name] = tensor.to("cpu", kept, copy=True).contiguous()
            self._size += size
            self.num_bytes += size

    def finish(self, directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the last shard and all other files.

        Args:
            directory: the original's; its small files are copied.
            files: name to content of JSON files, which count instead of the original's.
        """
        self._write()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards, 1):
            name = "model.safetensors"
            if count > 1:
                name = f"model-{i:05}-of-{count:05}.safetensors"
            (self._folder / f"{i}.part").rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            total = {"total_size": self.num_bytes}
            self._json(INDEX, {"metadata": total, "weight_map": weight_map})
        for path in _small_files(directory, _NOT_COPIED | set(files)):
            target = self._folder / path.relative_to(directory)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        for name, content in files.items():
            self._json(name, content)
        if self._output.exists():
            self._output.rmdir()
        self._folder.rename(self._output)

    def discard(self) -> None:
        """Remove what was written, if `finish` has not moved it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        path = self._folder / f"{len(self._shards) + 1}.part"
        path.touch()  # with the rights of a new file: safetensors makes one for its owner alone
        rights = path.stat().st_mode
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(rights)
        self._shards.append(list(self._waiting))
        self._waiting, self._size = {}, 0

    def _json(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (self._folder / name).write_text(text, encoding="utf-8")


def _small_files(directory: Path, skipped: set[str]) -> Iterable[Path]:
    """List the files beside the weights that a copy needs: tokenizer, templates, licence."""
    templates = directory / "additional_chat_templates"
    for path in sorted([*directory.glob("*"), *templates.glob("*")]):
        is_left = path.suffix in _WEIGHTS or path.name in skipped or path.name.startswith(".")
        if path.is_file() and not is_left:
            yield path
