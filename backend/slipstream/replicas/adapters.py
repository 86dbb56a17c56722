"""The adapters of all replicas: loaded and unloaded everywhere, and again by a new engine."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from slipstream_contract.errors import Code, ContractError

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
        """Return the adapters that any replica has, by name: requests go to those that have it.

        One that was published stays while it is to come back: loaded here, or no replica is up.
        """
        found = {info.name: info for info in self._published if self._comes_back(info.name)}
        for each in self._replicas:
            found.update(each.connection.adapters or {})
        return [found[name] for name in sorted(found)]

    def has(self, name: str) -> bool:
        """Return whether an adapter of that name was published."""
        return any(info.name == name for info in self._published)

    def _comes_back(self, name: str) -> bool:
        if name in self._unloaded:
            return False
        is_down = all(each.connection.adapters is None for each in self._replicas)
        return name in self._paths or is_down

    def start_load(self, name: str, path: str, reply: Reply) -> None:
        """Have all replicas load an adapter; `poll` calls `reply` with the first error, if any.

        Raises ContractError if none is up.
        """
        futures = _any(self._start(_loader(name, path)))
        self._unloaded.discard(name)
        self._loading.append((futures, name, path, reply))

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
        """Have all replicas discard a name. Raises ContractError, also if none is up."""
        futures = _any(self._start(lambda connection: _unload(connection, name)))
        errors = [future.result() for future in futures]
        is_coming = name in self._paths  # to engines that have just come
        for error in errors if all(errors) else ():
            if error is not None and not (is_coming and error.code is Code.NOT_FOUND):
                raise error
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


def _any(futures: list[Future[ContractError | None]]) -> list[Future[ContractError | None]]:
    """Return the answers of replicas; raises ContractError if none was up."""
    if futures:
        return futures
    raise ContractError("no replica is running; they are being restarted", Code.UNAVAILABLE)


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
