"""The adapters of all replicas: loaded and unloaded everywhere, and again by a new engine."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from slipstream_contract.errors import ContractError

from slipstream.bridge.connection import Connection
from slipstream.engine.served import Changed
from slipstream.replicas.replica import Replica
from slipstream.wire import AdapterInfo

_log = logging.getLogger(__name__)
_LOAD_S = 300.0
_UNLOAD_S = 5.0

Reply = Callable[[ContractError | None], None]


class RoutedAdapters:
    """See `engine/served.py`. The loop's thread calls it, but for `catch_up`."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.when_changed: Changed = lambda changed, removed: None
        self._replicas = replicas
        self._pool = ThreadPoolExecutor(2 * len(replicas), "adapters")
        self._loading: list[tuple[list[Future[ContractError | None]], str, str, Reply]] = []
        self._paths: dict[str, str] = {}  # what was loaded while the replicas served
        self._unloaded: set[str] = set()  # of those that an engine starts with, too
        self._published: list[AdapterInfo] = []

    @property
    def is_loading(self) -> bool:
        """Whether a load has not been answered."""
        return bool(self._loading)

    def infos(self) -> list[AdapterInfo]:
        """Return the adapters that any replica has, by name: requests go to those that have it."""
        found = dict[str, AdapterInfo]()
        for each in self._replicas:
            found.update(each.connection.adapters or {})
        return [found[name] for name in sorted(found)]

    def start_load(self, name: str, path: str, reply: Reply) -> None:
        """Have all replicas load an adapter; `poll` calls `reply` with the first error, if any."""
        self._unloaded.discard(name)

        def load(connection: Connection) -> None:
            connection.load_adapter(name, path, _LOAD_S)

        self._loading.append((self._start(load), name, path, reply))

    def poll(self) -> None:
        """Answer loads that have ended everywhere. One that failed anywhere is undone."""
        while self._loading and all(future.done() for future in self._loading[0][0]):
            futures, name, path, reply = self._loading.pop(0)
            error = _first(future.result() for future in futures)
            if error is None:
                self._paths[name] = path
            elif name not in self._paths:
                self._start(partial(_unload, name=name))
            reply(error)

    def take_watched(self) -> None:
        """Publish what has changed since the last call."""
        now = self.infos()
        if now == self._published:
            return
        before = {info.name: info for info in self._published}
        changed = [info for info in now if before.pop(info.name, None) != info]
        self._published = now
        self.when_changed(changed, list(before))

    def unload(self, name: str) -> None:
        """Have all replicas discard a name. Raises ContractError."""
        futures = self._start(lambda connection: _unload(connection, name))
        errors = [future.result() for future in futures]
        if all(errors) and errors[0] is not None:
            raise errors[0]
        self._paths.pop(name, None)
        self._unloaded.add(name)

    def catch_up(self, replica: Replica) -> None:
        """Have an engine that has just come load and unload what the others did."""
        for name, path in list(self._paths.items()):
            self._pool.submit(_logged, replica, _loader(name, path))
        for name in list(self._unloaded):
            self._pool.submit(replica.change_adapters, partial(_unload, name=name))

    def _start(self, change: Callable[[Connection], None]) -> list[Future[ContractError | None]]:
        up = [each for each in self._replicas if each.is_up()]
        return [self._pool.submit(each.change_adapters, change) for each in up]


def _loader(name: str, path: str) -> Callable[[Connection], None]:
    return lambda connection: connection.load_adapter(name, path, _LOAD_S)


def _unload(connection: Connection, name: str) -> None:
    connection.unload_adapter(name, _UNLOAD_S)


def _logged(replica: Replica, change: Callable[[Connection], None]) -> None:
    error = replica.change_adapters(change)
    if error is not None:
        _log.error("replica %d lacks an adapter that others have: %s", replica.number, error)


def _first(errors: Iterable[ContractError | None]) -> ContractError | None:
    return next((error for error in errors if error is not None), None)
