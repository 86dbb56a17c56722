"""Run the router's process, in the place of an engine's: `python -m slipstream.replicas.process`.

Arguments and exit codes are those of `engine/process.py`. Each replica has a supervisor of its own,
whose files are in the folder `replica-N` of this engine's. They outlive a router that dies: the
next one finds them with their weights loaded. They end with the server, or once all models are
unloaded.
"""

import logging
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq
from slipstream_contract.errors import ContractError
from slipstream_runtime.directory import OWNER_VARIABLE, VARIABLE, Runtime
from slipstream_runtime.ranks import RankMemory

from slipstream import __version__, wire
from slipstream.config import MAX_REPLICAS, EngineConfig
from slipstream.engine.loop import EngineLoop
from slipstream.engine.process import main as run_process
from slipstream.errors import ConfigError, StartError
from slipstream.launch import UNUSED
from slipstream.replicas.placing import places
from slipstream.replicas.replica import Replica
from slipstream.replicas.router import Router

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_ALL_UP = "replicas.up"  # a file that exists once all replicas of a server have been up


class RouterLoop(EngineLoop):
    """The loop of an engine, which also wakes when a replica has sent something."""

    def __init__(self, router: Router, welcome: wire.Welcome, address: str) -> None:
        super().__init__(router, welcome, f"ipc://{address}")
        self._folder = Path(address).parent
        self._router = router
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(router.wake, zmq.POLLIN)

    def run(self) -> int:
        """Serve as an engine does; close the router behind it."""
        code = super().run()
        if code == UNUSED:
            (self._folder / _ALL_UP).unlink(missing_ok=True)
            self._router.close()
        return code

    def _await_work(self, idle_ms: int) -> bool:
        ready = dict(self._poller.poll(idle_ms))
        if self._router.wake in ready:
            os.eventfd_read(self._router.wake)
        return bool(ready)

    def _apply(self, bridge: bytes, message: wire.EngineMessage) -> None:
        if isinstance(message, wire.Ping) and not self._router.answers:
            return  # as an engine that hangs
        super()._apply(bridge, message)


def make(
    config: EngineConfig,
    address: str,
    memory_lock: Path | None = None,
    ranks: RankMemory | None = None,
) -> RouterLoop:
    """Start the replicas, wait for them, and listen. Raises StartError if one cannot start.

    The first router of a server waits for all of them; a later one for any.
    """
    socket = Path(address.removeprefix("ipc://")).absolute()
    if not 2 <= config.replicas <= MAX_REPLICAS:
        raise ConfigError(f"replicas = {config.replicas} is not between 2 and {MAX_REPLICAS}")
    runtime = _runtime_of(socket)
    owner = int(os.environ.get(OWNER_VARIABLE) or os.getppid())
    router = Router(runtime, places(config, os.environ), owner)
    mark = socket.parent / _ALL_UP
    try:
        welcome = _wait(router, needs_all=not mark.exists())
        router.look()
    except BaseException:
        router.close(ends_replicas=True)
        raise
    mark.touch()
    _log.info("%s", banner(config, welcome))
    return RouterLoop(router, welcome, str(socket))


def banner(config: EngineConfig, welcome: wire.Welcome) -> str:
    """Return the line of the log at start; each replica's own has its cache."""
    return (
        f"{welcome.model} ({welcome.architecture}, {welcome.dtype}, {welcome.device}): "
        f"{config.replicas} replicas, sequences of {welcome.max_model_len:,} tokens"
    )


def _runtime_of(socket: Path) -> Runtime:
    """Return the runtime directory in which an engine's socket is, with the engine's folder."""
    directory = Path(os.environ.get(VARIABLE) or socket.parent).absolute()
    folder = os.path.relpath(socket.parent, directory)
    return Runtime(directory, "" if folder == "." else folder)


def _wait(router: Router, needs_all: bool) -> wire.Welcome:
    """Wait until replicas are up; return what they say. Raises StartError."""
    while True:
        up = [each for each in router.replicas if each.is_up()]
        if up and (len(up) == len(router.replicas) or not needs_all):
            return _welcome([each.welcome for each in up if each.welcome is not None])
        for replica in router.replicas:
            _raise_if_failed(replica)
        time.sleep(_LOOK_S)


def _raise_if_failed(replica: Replica) -> None:
    failure = replica.starter.failure()
    try:
        replica.connection.wait_welcome(0)
    except ContractError as error:
        failure = failure or error.message
    if failure is not None:
        raise StartError(f"replica {replica.number}: {failure}")


def _welcome(found: list[wire.Welcome]) -> wire.Welcome:
    """Return what bridges get: of the first replica, with the shortest context of all."""
    first = found[0]
    return msgspec.structs.replace(
        first,
        protocol=wire.PROTOCOL,
        version=__version__,
        engine_pid=os.getpid(),
        max_model_len=min(each.max_model_len for each in found),
    )


if __name__ == "__main__":
    sys.exit(run_process(make=make))
