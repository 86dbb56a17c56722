"""The directory of an adapter: its files are opened once, as files, and none outside a root.

A directory may be a client's choice, and what lies in it anybody's. A path is looked at without
opening what it leads to (`O_PATH`), so links, and what is swapped between a look and a read, lead
to an error and never to a file of others; pipes and devices are not opened at all. No torch.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from slipstream.errors import CheckpointError

_LOOK = os.O_PATH | os.O_CLOEXEC


class AdapterFolder:
    """An adapter's directory, opened; a context manager.

    Args:
        directory: of PEFT's files.
        root: below which directory and files must lie, links resolved; empty: anywhere.
    """

    def __init__(self, directory: Path, root: str = "") -> None:
        self.directory = directory
        self._root = Path(root).resolve() if root else None
        self._handle = -1

    def __enter__(self) -> Self:
        """Open it. Raises `CheckpointError`."""
        self._handle = self._look(self.directory, self.directory, "directory", stat.S_ISDIR)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        os.close(self._handle)

    @property
    def here(self) -> Path:
        """A path to the very directory that was opened, for as long as it is."""
        return Path(f"/proc/self/fd/{self._handle}")

    def open(self, name: str) -> BinaryIO:
        """Open a file of it to read. Raises `CheckpointError`."""
        path = self.directory / name
        handle = self._look(self.here / name, path, "file", stat.S_ISREG)
        try:
            return Path(f"/proc/self/fd/{handle}").open("rb")  # that file, whatever the path is now
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        finally:
            os.close(handle)

    def read(self, name: str, most: int) -> bytes:
        """Return what a file of at most so many bytes holds. Raises `CheckpointError`."""
        with self.open(name) as file:
            found = file.read(most + 1)
        if len(found) > most:
            raise CheckpointError(f"{self.directory / name}: has more than {most} bytes")
        return found

    def _look(self, path: Path, shown: Path, what: str, is_such: Callable[[int], bool]) -> int:
        """Return a handle of what a path leads to, which is not opened."""
        try:
            handle = os.open(path, _LOOK)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{shown}: no such {what}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "no path"
            raise CheckpointError(f"{shown}: cannot be read: {why}") from None
        try:
            real = Path(f"/proc/self/fd/{handle}").readlink()
            if self._root is not None and not real.is_relative_to(self._root):
                raise CheckpointError(f"{shown}: leads out of adapter_root")
            if not is_such(os.fstat(handle).st_mode):
                raise CheckpointError(f"{shown}: is no {what}")
        except BaseException:
            os.close(handle)
            raise
        return handle
