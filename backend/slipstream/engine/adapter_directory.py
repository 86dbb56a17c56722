"""A directory whose sub-directories are adapters: they appear, change and vanish at run time.

A sub-directory counts once two looks have found the same of it, and it is the same after it was
read: what is half written waits. So does what vanishes, as to replace a directory takes two acts.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from slipstream_runtime.once import warn_once

from slipstream.errors import StartError

_log = logging.getLogger(__name__)

FILES = ("adapter_config.json", "adapter_model.safetensors")
EVERY_S = 1.0

_Signature = tuple[tuple[int, int, int, int], ...]  # of each file


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """What became of a sub-directory."""

    name: str
    path: str
    weights: Any  # None: it is gone


class AdapterDirectory:
    """The sub-directories of a directory, looked at in a thread of their own."""

    def __init__(self, root: Path, read: Callable[[str], Any]) -> None:
        """Take a directory; `read` reads and checks an adapter in any thread (`StartError`)."""
        self._root = root
        self._read = read
        self._before: dict[str, _Signature] = {}  # as the last look found them
        self._done: dict[str, _Signature] = {}  # read, or refused
        self._changes: SimpleQueue[AdapterChange] = SimpleQueue()
        self._is_lost = False  # the directory itself

    def start(self) -> None:
        """Look from now on, every `EVERY_S`, until the process ends."""
        threading.Thread(target=self._run, name="adapter-directory", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY_S):
            self.look()

    def take(self) -> Iterator[AdapterChange]:
        """Take what has changed."""
        while not self._changes.empty():
            yield self._changes.get()

    def look(self) -> None:
        """Look once; pass on what two looks agree on."""
        try:
            now = self._signatures()
        except OSError as error:  # of a file system that is away: what is loaded stays
            if not self._is_lost:
                _log.warning("adapter_dir cannot be read, its adapters stay as they are: %s", error)
            self._is_lost = True
            return
        self._is_lost = False
        before, self._before = self._before, now
        for name in sorted(now.keys() | self._done.keys()):
            signature = now.get(name)
            if signature == before.get(name) and signature != self._done.get(name):
                self._pass_on(name, signature)

    def _pass_on(self, name: str, signature: _Signature | None) -> None:
        path = self._root / name
        if signature is None:
            del self._done[name]
            self._changes.put(AdapterChange(name, str(path), None))
            return
        try:
            weights = self._read(str(path))
        except StartError as error:
            if _signature(path) == signature:
                self._done[name] = signature
                _log.warning("adapter_dir: %s is not loaded: %s", name, error)
            return
        except OSError:  # it vanishes or changes now
            return
        except Exception as error:  # of this moment, as memory that is short: the next look tries
            line = f"adapter_dir: {name} is not loaded yet: {type(error).__name__}: {error}"
            warn_once(_log, line, (str(path), signature, type(error)))
            return
        if _signature(path) == signature:
            self._done[name] = signature
            self._changes.put(AdapterChange(name, str(path), weights))

    def _signatures(self) -> dict[str, _Signature]:
        names = [path.name for path in self._root.iterdir() if not path.name.startswith(".")]
        found = {name: _signature(self._root / name) for name in names}
        return {name: signature for name, signature in found.items() if signature is not None}


def _signature(directory: Path) -> _Signature | None:
    """Return what tells a directory's content from another; None: a file is missing."""
    try:
        stats = [(directory / name).stat() for name in FILES]
    except OSError:
        return None
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)
