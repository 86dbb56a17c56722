"""Place the files that are made of a GGUF file in a repository, beside the engine's settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.errors import CheckpointError
from slipstream.models.gguf.tensors import REFERENCE
from slipstream.models.gguf.unpack import reference

FOLDER = "checkpoint"


def placed(checkpoint: Path, place: Path, made: Mapping[Path, str]) -> dict[Path, str]:
    """Return path below `place` -> contents, the reference to the GGUF file among them.

    Args:
        checkpoint: the GGUF file.
        place: the folder of the engine's model.json.
        made: the other files; empty: the checkpoint is a directory, and needs none.

    Raises CheckpointError where another checkpoint is in their place.
    """
    folder = place / FOLDER
    if made and folder.exists() and not _is_ours(folder):
        raise CheckpointError(f"{folder} is not made of a GGUF file: move it away first")
    files = {**made, **reference(checkpoint, folder)} if made else {}
    return {Path(FOLDER) / name: text for name, text in files.items()}


def found(place: Path) -> Iterator[Path]:
    """Yield the files that an earlier call placed below `place`."""
    if _is_ours(place / FOLDER):
        yield from (path for path in sorted((place / FOLDER).rglob("*")) if path.is_file())


def _is_ours(folder: Path) -> bool:
    return (folder / REFERENCE).is_file()
