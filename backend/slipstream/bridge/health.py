"""Serve model `slipstream_health`: whether the engine can make tokens now, by its own answer.

The server's readiness stays 200 when the engine, or even a stub, is dead; this model fails then. A
model may have several processes, of which a request reaches only one, so the report also lists
faults of the others. It is about one engine of the server and the models that use it.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from slipstream_contract.deployment import split_name
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime import draining, vitals
from slipstream_runtime.directory import Runtime
from slipstream_runtime.processes import is_running, is_stopped
from slipstream_runtime.stillness import STILL_S, STOPPED_S, Stillness

from slipstream import wire
from slipstream.bridge.bridge import Bridge
from slipstream.bridge.periodic import Periodic
from slipstream.bridge.streams import Outputs
from slipstream.config import EngineConfig

_ANSWER_S = 1.0
_PERIOD_S = 0.25  # between two looks at the other processes


class Report(msgspec.Struct, frozen=True):
    """The answer, as JSON."""

    model: str
    engine_pid: int
    kv_blocks_free: int  # a cached block that no sequence uses counts as free
    kv_blocks_total: int
    running: int
    waiting: int
    last_step_age_s: float  # 0 while idle
    about: "About"
    faults: list[str] = []  # of the processes of this engine's models
    is_draining: bool = False  # the server refuses new requests, or is about to
    replicas: list[wire.ReplicaState] = []  # if there are several engines


_OF_ENGINE = Report.__struct_fields__[:-4]


class About(msgspec.Struct, frozen=True):
    """What an engine serves, which does not change while it runs."""

    deployment: str
    checkpoint: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int  # tokens
    memory_share: float | None  # of the device; None: what is free

    @classmethod
    def of(cls, engine_model: str, config: EngineConfig, welcome: wire.Welcome) -> Self:
        """Return what there is to say of an engine that is ready."""
        return cls(
            split_name(engine_model)[0],
            config.checkpoint,
            welcome.architecture,
            welcome.dtype,
            welcome.device,
            welcome.max_model_len,
            config.memory_share,
        )


def health(bridge: Bridge, siblings: "Siblings", about: About, output: str) -> Outputs:
    """Return a `Report` as the given output.

    Raises ContractError if the engine does not answer in 1 s, or the processes cannot be examined.
    """
    status: wire.Status = bridge.connection.request_status(_ANSWER_S)
    state = {field: getattr(status, field) for field in _OF_ENGINE}
    try:
        report = Report(
            **state,
            about=about,
            faults=siblings.look(),
            is_draining=siblings.is_draining(),
            replicas=status.replicas,
        )
    except OSError as error:  # for example, this process is out of file descriptors
        raise ContractError(
            f"the models' processes cannot be looked at: {error.strerror}", Code.UNAVAILABLE
        ) from error
    return {output: np.array([msgspec.json.encode(report)], dtype=object)}


class Siblings:
    """Looks at the processes of the models of one engine, by their `vitals`. Thread-safe.

    A hanging process is recognised over several looks, so a thread looks even without requests.
    """

    def __init__(
        self, runtime: Runtime, is_sibling: Callable[[str], bool] = lambda model: True
    ) -> None:
        """Start the thread; `is_sibling` says of a model whether it uses the engine."""
        self._lock = threading.Lock()
        self._is_sibling = is_sibling
        self._known: dict[str, bool] = {}  # model -> whether it is one
        self._runtime = runtime
        self._directory = runtime.directory
        self._started_ns = time.monotonic_ns()
        self._still: dict[Path, Stillness] = {}
        self._stopped_s: dict[Path, float] = {}  # when each stop was first seen
        self._periodic = Periodic("siblings", _PERIOD_S, self.look)

    def close(self) -> None:
        """End the thread."""
        self._periodic.close()

    def is_draining(self) -> bool:
        """Return whether the server drains, or is about to."""
        return draining.has_started(self._runtime)

    def look(self) -> list[str]:
        """Return what is wrong now, one line for each process."""
        with self._lock:
            files = {path for path in self._directory.glob("vitals-*") if self._is_ours(path)}
            for known in (self._still, self._stopped_s):
                for gone in known.keys() - files:
                    del known[gone]
            found = [(file, self._wrong_with(file)) for file in sorted(files)]
        return [_named(file, what) for file, what in found if what]

    def _is_ours(self, file: Path) -> bool:
        model = _model_of(file)
        if model not in self._known:
            self._known[model] = self._is_sibling(model)
        return self._known[model]

    def _wrong_with(self, file: Path) -> str:
        pid = vitals.pid_of(file)
        if not is_running(pid):
            signs = vitals.read(file)
            # Otherwise a file of an earlier server, or even from before the machine's last boot.
            is_ours = signs is not None and self._started_ns < signs.beat_ns <= time.monotonic_ns()
            return "ended" if is_ours else ""
        if is_stopped(pid):
            stopped_s = time.monotonic() - self._stopped_s.setdefault(file, time.monotonic())
            return "was stopped" if stopped_s > STOPPED_S else ""
        self._stopped_s.pop(file, None)
        still = self._still.setdefault(file, Stillness(pid, file))
        return f"{still.what} for {STILL_S:g} s" if still.look(0.0) else ""


def _named(file: Path, what: str) -> str:
    return f"the process of model {_model_of(file)} (pid {vitals.pid_of(file)}) {what}"


def _model_of(file: Path) -> str:
    return file.name.removeprefix("vitals-").rpartition("-")[0]
