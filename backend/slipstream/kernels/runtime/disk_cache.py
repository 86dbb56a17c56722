"""Files that may be lost and made again: below `$XDG_CACHE_HOME/slipstream`, or `~/.cache`."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def folder(kind: str) -> Path:
    """Return the folder of files of a kind; it need not exist."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "slipstream" / kind


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` at the end of the block.

    A reader sees the old one, the new one, or none. Raises OSError; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check_writable(folder: Path) -> None:
    """Make the folder, and a file in it, which is gone at once. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, as `replacing` does."""
    with replacing(path) as file:
        file.write(data)
