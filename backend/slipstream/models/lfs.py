"""Pointers of Git LFS, which lie in the place of files where a repository was cloned without it."""

from pathlib import Path

from slipstream.errors import CheckpointError

_START = b"version https://git-lfs"


def check_fetched(path: Path, start: bytes) -> None:
    """Raise `CheckpointError` if a file that starts so, by four bytes or more, is a pointer."""
    if len(start) >= 4 and _START.startswith(start[: len(_START)]):
        raise CheckpointError(
            f"{path}: a pointer of Git LFS in the place of the file: fetch it (git lfs pull)"
        )
