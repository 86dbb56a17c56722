"""Write a checkpoint directory: shards, index, and the small files as they were or as given."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from slipstream.errors import ConfigError
from torch import Tensor

SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_NOT_COPIED = {"gguf.json", "hf_quant_config.json", INDEX, "pytorch_model.bin.index.json"}


class Writer:
    """Collects tensors and writes a shard whenever there are enough; `finish` names the shards.

    Until then all of it lies in a folder that does not load: beside `output`, or in it, if that is
    an empty directory: another disk may be mounted there. What a killed process has left there is
    removed.

    Args:
        output: the directory to make.
        shard_bytes: of a file, at most, but for a tensor that is larger.
        single: name of the file, if there is one.

    Raises `ConfigError` if `output` is a file or holds something, if another process writes it, and
    whenever it cannot be written.
    """

    def __init__(
        self, output: Path, shard_bytes: int = SHARD_BYTES, single: str = "model.safetensors"
    ) -> None:
        self._named, self._single = output, single
        with self._writing():
            self._output = Path(os.path.realpath(output))
            self._is_inside = self._output.is_dir()
            name = f".{self._output.name}.unfinished"
            self._folder = self._output / name if self._is_inside else self._output.with_name(name)
            others = [each for each in self._output.glob("*") if each != self._folder]
            if others or (os.path.lexists(self._output) and not self._is_inside):
                raise ConfigError(
                    f"--output {output}: is there already, and not an empty directory"
                )
            self._lock = self._start()
        self._limit = shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._size = 0
        self._shards: list[list[str]] = []
        self.num_bytes = 0

    def _start(self) -> int:
        """Make the folder anew; return what is locked while this process writes it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(f"--output {self._named}: another process is writing it") from None
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return lock

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--output {self._named}: cannot be written: {reason}") from None

    def check_space(self, num_bytes: int) -> None:
        """Raise `ConfigError` if the disk has less left than will be written at least."""
        free = shutil.disk_usage(self._folder).free
        if free < num_bytes:
            raise ConfigError(
                f"--output {self._named}: {num_bytes / 1e9:,.2f} GB will be written, at least, and "
                f"{free / 1e9:,.2f} GB are free there"
            )

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
        with self._writing():
            self._finish(directory, files)

    def _finish(self, directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards, 1):
            name = self._single
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
        if not self._is_inside:
            self._folder.rename(self._output)
            return
        # Without its configuration nothing loads.
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(self._output / path.name)

    def discard(self) -> None:
        """Remove what was written, if `finish` has not moved it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _write(self) -> None:
        path = self._folder / f"{len(self._shards) + 1}.part"
        with self._writing():
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
