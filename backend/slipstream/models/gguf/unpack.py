"""Make the small files of a Hugging Face checkpoint of a GGUF file; the weights stay in it."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipstream_contract.decoder import UnsupportedTokenizerError

from slipstream.errors import CheckpointError
from slipstream.models.gguf.config import EMBEDDING, config_of
from slipstream.models.gguf.file import SUFFIX, GgufFile
from slipstream.models.gguf.parts import read_gguf
from slipstream.models.gguf.tensors import REFERENCE, reference_to
from slipstream.models.gguf.tokenizer import GgufTokenizer, has_tokenizer


def is_gguf(checkpoint: Path) -> bool:
    """Return whether a path names a GGUF file, there or not, and no directory."""
    return checkpoint.suffix.lower() == SUFFIX and not checkpoint.is_dir()


@contextmanager
def as_directory(checkpoint: Path) -> Iterator[tuple[Path, Mapping[Path, str]]]:
    """Give a checkpoint as a directory that can be read, and the files made for it.

    A directory is its own, and nothing is made. A GGUF file gets one that is there as long as the
    context; a `CheckpointError` or `UnsupportedTokenizerError` out of it names the file instead.
    """
    if not is_gguf(checkpoint):
        yield checkpoint, {}
        return
    file = read_gguf(checkpoint)
    files = unpack(file)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        directory = Path(name)
        for path, content in {**files, **reference(file.path, directory)}.items():
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(content, encoding="utf-8", newline="\n")
        try:
            yield directory, files
        except (CheckpointError, UnsupportedTokenizerError) as error:
            raise type(error)(str(error).replace(name, str(checkpoint))) from None


def unpack(file: GgufFile) -> dict[Path, str]:
    """Return name -> contents of all files but the reference; raises `CheckpointError`."""
    config = config_of(file)
    generation: dict[str, object] = {}
    files: dict[Path, str] = {}
    if has_tokenizer(file.metadata):
        tokenizer = GgufTokenizer(file)
        rows = file.tensors[EMBEDDING].shape[0]
        if tokenizer.num_tokens > rows:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.tokens has {tokenizer.num_tokens} tokens, the "
                f"embedding {rows} rows"
            )
        files = tokenizer.files()
        generation = {**tokenizer.special_ids(), "eos_token_id": tokenizer.end_ids()}
    files[Path("config.json")] = _json(config)
    files[Path("generation_config.json")] = _json(generation)
    return files


def reference(path: Path, directory: Path) -> dict[Path, str]:
    """Return the file by which `directory` refers to a GGUF file.

    A path to a file in the same model repository, `directory`'s third parent, is relative.
    """
    target, here = Path(os.path.abspath(path)), Path(os.path.abspath(directory))
    is_near = len(here.parents) > 2 and target.is_relative_to(here.parents[2])
    text = os.path.relpath(target, here) if is_near else str(target)
    return {Path(REFERENCE): _json(reference_to(read_gguf(path), text))}


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
