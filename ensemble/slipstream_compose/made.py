"""Place the files that are made of a GGUF file in a repository, beside the engine's settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.errors import CheckpointError
from slipstream.models.gguf.tensors import REFERENCE
from slipstream.models.gguf.unpack import reference

FOLDER = "checkpoint"
DRAFT_FOLDER = "draft_checkpoint"


def placed(
    checkpoint: Path, place: Path, made: Mapping[Path, str], name: str = FOLDER
) -> dict[Path, str]:
    """Return path below `place` -> contents, the reference to the GGUF file among them.

    Args:
        checkpoint: the GGUF file.
        place: the folder of the engine's model.json.
        made: the other files; empty: the checkpoint is a directory, and needs none.
        name: of the folder that they get below `place`.

    Raises CheckpointError where another checkpoint is in their place.
    """
    folder = place / name
    if made and folder.exists() and not _is_ours(folder):
        raise CheckpointError(f"{folder} is not made of a GGUF file: move it away first")
    files = {**made, **reference(checkpoint, folder)} if made else {}
    return {Path(name) / path: text for path, text in files.items()}


def placed_draft(checkpoint: Path, place: Path, made: Mapping[Path, str]) -> dict[Path, str]:
    """Return the same of a drafter's checkpoint."""
    return placed(checkpoint, place, made, DRAFT_FOLDER)


def found(place: Path) -> Iterator[Path]:
    """Yield the files that an earlier call placed below `place`."""
    for folder in (place / FOLDER, place / DRAFT_FOLDER):
        if _is_ours(folder):
            yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def _is_ours(folder: Path) -> bool:
    return (folder / REFERENCE).is_file()
