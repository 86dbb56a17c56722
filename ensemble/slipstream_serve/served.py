"""The models of a server: which are loaded, and whose they are.

A supervised server loads all models of its repository, or some. With open control its clients load
and unload others, by Triton's own API, and a repair must bring back what was loaded, no more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream_contract.deployment import deployments_of, engine_model_of, folder_of
from slipstream_runtime.repairs import Repairs

from slipstream_serve.triton import ServeError, TritonServer

LOOK_S = 1.0  # between two looks at what clients have loaded
_COUNT = re.compile(r"\bcount\s*:\s*(\d{1,4})\b")
_ANSWER_S = 1.0  # below `supervise.MAX_GAP_S`: a server that hangs must not hide it


def chosen(repository: Path, models: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the models that names of models and of deployments mean; `*` means all.

    Raises ServeError for a name of neither, with those that are there.
    """
    try:
        members = {each.name: each.members for each in deployments_of(repository)}
    except ValueError as error:
        raise ServeError(str(error)) from None
    found: dict[str, None] = {}
    if "*" in names:
        return list(models)
    for name in names:
        if name not in members and name not in models:
            there = ", ".join(dict.fromkeys([*members, *models]))
            raise ServeError(f"--load {name}: {repository} has no such model; it has {there}")
        found |= dict.fromkeys(members.get(name, [name]))
    return list(found)


def num_instances(model: Path) -> int:
    """Return how many processes the config.pbtxt of a model's folder asks for; 0: it does not say.

    It says so for all models that compose writes.
    """
    try:
        text = (model / "config.pbtxt").read_text(errors="replace")
    except OSError:
        return 0
    return sum(int(number) for number in _COUNT.findall(text))


class Loaded:
    """The models that a server is to have now."""

    def __init__(self, server: TritonServer) -> None:
        """Begin with those that it loads when it starts."""
        everything = (path.parent.name for path in server.repository.glob("*/config.pbtxt"))
        self.models = set(everything if server.models is None else server.models)
        self._server = server
        self._looked_s = 0.0

    def look(self, is_due: bool = False) -> bool:
        """Look, once a second or if it is due, what clients have loaded; return whether it differs.

        A server that does not answer has what it had.
        """
        now_s = time.monotonic()
        if not self._server.has_open_control or not (is_due or now_s > self._looked_s + LOOK_S):
            return False
        self._looked_s = now_s
        try:
            found = self._server.loaded(_ANSWER_S)
        except ServeError:
            return False
        before, self.models = self.models, found
        return found != before


class RepairCounts:
    """Counts of repairs, in a file for each engine: of its models, and of the whole server.

    Those of models of other backends are counted with the engine of `tensorrt_llm`.
    """

    def __init__(self, server: TritonServer) -> None:
        """Make the files, as far as the engines have been started."""
        self._server = server
        self._files: dict[str, Repairs] = {}
        for folder in self._folders():
            self._file(folder)

    def note(self, model: str | None) -> None:
        """Count a repair of a model; None: of the server."""
        if model is None:
            for folder in self._folders():
                self._file(folder).note("server")
            return
        try:
            folder = folder_of(engine_model_of(self._server.repository / model))
        except ValueError:
            folder = ""
        self._file(folder if folder in self._folders() else "").note("model")

    def _folders(self) -> list[str]:
        try:
            found = [each.folder for each in deployments_of(self._server.repository)]
        except ValueError:  # as its own processes report
            found = []
        return list(dict.fromkeys(["", *found]))

    def _file(self, folder: str) -> Repairs:
        if folder not in self._files:
            self._files[folder] = Repairs(self._server.runtime.of(folder).repairs)
        return self._files[folder]
