"""Represent a replica in its router: a supervisor, a connection, and what was sent there."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Set
from typing import Protocol

from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.admission import Load, LoadFile, path_of
from slipstream_runtime.directory import MAX_SOCKET_PATH, Runtime

from slipstream import wire
from slipstream.bridge.connection import Connection
from slipstream.errors import ConfigError
from slipstream.launch import SupervisorStarter
from slipstream.replicas.cached import CachedPrefixes
from slipstream.replicas.placing import Place
from slipstream.replicas.policy import View

_SUPERVISOR_S = 30  # time that a supervisor has to replace a stuck engine
_FOLDER = "replica-"
_NO_LOAD = Load(0, 0, 0, 0, 0)


class Owner(Protocol):
    """The receiver of what replicas send; called in their connections' threads."""

    def take(self, replica: "Replica", outputs: wire.StepOutputs) -> None:
        """Take new tokens."""

    def reject(self, replica: "Replica", rejected: wire.Rejected) -> None:
        """Take note of a request that the replica refuses."""

    def lose_messages(self, replica: "Replica", requests: Iterable[int]) -> None:
        """Take note of requests of which a message was lost."""

    def lose_engine(self, replica: "Replica", kept: Set[int]) -> None:
        """Take note that its engine is gone; see `Listener.lose_engine`."""

    def is_waiting_for(self, request: int) -> bool:
        """Return whether the tokens of a request are still wanted."""

    def greet(self, replica: "Replica") -> None:
        """Take note that its engine is there."""


class Replica:
    """An engine of several. All but the `Listener` methods are called under the router's lock.

    Attributes:
        num_queued: tokens of prompts sent there that are not computed, as far as the cache lacked
            them.
        num_held: tokens of requests that are there.
        num_streams: sequences that have begun to answer.
        num_sent, num_restarts: requests sent, engines lost, ever.
    """

    def __init__(
        self,
        number: int,
        runtime: Runtime,
        place: Place,
        server_pid: int,
        prefix_key: bytes,
        owner: Owner,
    ) -> None:
        """Start to connect; a supervisor is started if none runs."""
        self.number = number
        self.num_queued = self.num_held = self.num_streams = 0
        self.num_sent = self.num_restarts = 0
        self.cached = CachedPrefixes()
        self.welcome: wire.Welcome | None = None
        self._owner = owner
        self._is_there = False  # an engine, whose end is to be counted
        folder = f"{_FOLDER}{number}"
        self.runtime = runtime.of(str(os.path.join(runtime.folder, folder)))
        self.runtime.home.mkdir(mode=0o700, exist_ok=True)
        if len(os.fsencode(self.runtime.socket)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"{self.runtime.socket}: longer than {MAX_SOCKET_PATH} bytes; set TMPDIR"
            )
        self._load_file = LoadFile(path_of(self.runtime.socket))
        self.starter = SupervisorStarter(self.runtime, place.config, server_pid, place.environment)
        self.connection = Connection(
            self.runtime.address,
            f"router {number}",
            self,
            self.starter.ensure,
            place.config.stuck_after_s + _SUPERVISOR_S,
            prefix_key=prefix_key,
            take_prefixes=self._take_prefixes,
            outage=self.starter.outage,
        )

    # --- the router's side ---------------------------------------------------------------------

    def is_up(self) -> bool:
        """Return whether its engine takes requests."""
        with contextlib.suppress(ContractError):
            self.welcome = self.connection.wait_welcome(0) or self.welcome
            return self.connection.wait_welcome(0) is not None
        return False

    @property
    def engine_pid(self) -> int:
        """The process of its engine; 0: it is down."""
        return self.welcome.engine_pid if self.is_up() and self.welcome is not None else 0

    def load(self) -> Load:
        """Return what its engine has published last; nothing while it is down or idle."""
        load, is_recent = self._load_file.last()
        if load is None or not self.is_up():
            return _NO_LOAD
        if is_recent:
            return load
        return load._replace(num_requests=0, num_tokens=0, num_running=0)

    def view(self, num_cached: int, num_prompt: int) -> View:
        """Return what the policy is to know."""
        load, status = self.load(), self.connection.status
        try:
            load.raise_if_full(num_prompt)
            is_full = False
        except ContractError:
            is_full = load.max_requests > 0
        room = 1 << 62
        if status is not None and self.cached.block_size:
            room = status.kv_blocks_total * self.cached.block_size
        return View(
            num_cached,
            self.num_queued,
            self.num_held,
            room,
            self.num_streams,
            self.num_sent,
            is_full,
        )

    def silent_s(self) -> float:
        """Return for how long it has sent nothing, in s."""
        return time.monotonic() - self.connection.heard_s

    def state(self) -> wire.ReplicaState:
        """Return what there is to say of it."""
        status = self.connection.status
        if status is None:
            return wire.ReplicaState(
                self.number, 0, False, num_requests=self.num_sent, num_restarts=self.num_restarts
            )
        return wire.ReplicaState(
            self.number,
            status.engine_pid,
            self.is_up(),
            status.running,
            status.waiting,
            status.kv_blocks_free,
            status.kv_blocks_total,
            self.num_sent,
            self.num_restarts,
        )

    def reset(self) -> bool:
        """Discard what was known of an engine; return whether it was there, or never came."""
        had_engine, self._is_there = self._is_there, False
        self.num_queued = self.num_held = self.num_streams = 0
        self.num_restarts += had_engine
        self.cached.clear()
        return had_engine

    def adapter_digest(self, name: str) -> bytes | None:
        """Return the digest of an adapter that it has; None: it has none of that name."""
        info = (self.connection.adapters or {}).get(name)
        return None if info is None else bytes.fromhex(info.digest)

    def change_adapters(self, change: Callable[[Connection], None]) -> ContractError | None:
        """Load or unload an adapter there; return what went wrong."""
        try:
            change(self.connection)
        except ContractError as error:
            return error if self.is_up() else None  # the next engine gets it as it comes
        except Exception as error:  # of a socket that is being closed
            return ContractError(f"{type(error).__name__}: {error}", Code.INTERNAL)
        return None

    # --- `Listener`, in the connection's thread ------------------------------------------------

    def take(self, outputs: wire.StepOutputs) -> None:
        """Pass on new tokens."""
        self._owner.take(self, outputs)

    def reject(self, rejected: wire.Rejected) -> None:
        """Pass on a refusal."""
        self._owner.reject(self, rejected)

    def lose_messages(self, requests: Iterable[int]) -> None:
        """Pass on that messages were lost."""
        self._owner.lose_messages(self, requests)

    def lose_engine(self, kept: Set[int]) -> None:
        """Pass on that the engine is gone."""
        self._owner.lose_engine(self, kept)

    def is_waiting_for(self, request: int) -> bool:
        """Return whether the tokens of a request are still wanted."""
        return self._owner.is_waiting_for(request)

    def _take_prefixes(self, message: wire.Prefixes) -> None:
        self.cached.take(message)
        if message.is_whole:
            self._is_there = True
            self._owner.greet(self)
