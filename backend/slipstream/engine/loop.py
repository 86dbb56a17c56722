"""Serve an engine on a socket: poll, apply messages, step, send; in one thread.

No message from the socket can end the process. `engine/process.py` runs this.
"""

import logging
import os
import time
from pathlib import Path

import msgspec
import zmq
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.admission import LoadFile
from slipstream_runtime.admission import path_of as load_path_of
from slipstream_runtime.turns import Turns, path_of

from slipstream import wire
from slipstream.engine.adapter_counts import AdapterCounts
from slipstream.engine.chores import Chores
from slipstream.engine.keepers import Keepers
from slipstream.engine.reports import StatusLine
from slipstream.engine.served import Served
from slipstream.launch import UNUSED

_log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 512 << 20  # of a request with the weights of an adapter
_MAX_UNSENT = 16_384  # messages to one bridge; one further behind is disconnected
_MAX_FRAMES = 1024  # read between two steps, so that a flood of messages cannot stop generation
_MS = 1_000_000  # in ns
_IDLE_MS = 1000  # an idle loop checks this often whether its parent is alive
_LOADING_MS = 2  # an idle loop looks this often for adapters that are read
_SILENCE_S = 5.0  # bridges ping every second; one silent for longer is probed


class EngineLoop:
    """A ROUTER socket around an `Engine`: accepts bridges, and sends each bridge its own tokens."""

    def __init__(
        self, engine: Served, welcome: wire.Welcome, address: str, chores: Chores | None = None
    ) -> None:
        self.num_dropped = 0  # frames that were not messages, out of turn, or not applicable
        self.num_unknown = 0  # cancels of requests that are not there
        self._engine = engine
        self._chores = chores or Chores(iter(()))
        engine.adapters.when_changed = self._publish_adapters
        self._welcome = welcome
        self._bridges: dict[bytes, wire.Hello] = {}  # connected bridges
        self._followers: set[bytes] = set()  # connected bridges that want `Prefixes`
        self._keepers, self._adapter_counts = Keepers(), AdapterCounts(engine.has_request)
        self._heard_s: dict[bytes, float] = {}
        self._next_probe_s = 0.0
        self._status_line = StatusLine(time.monotonic())
        self._parent = os.getppid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # the engine's own bound is max_waiting
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._socket.bind(address)
        self._turns = Turns(path_of(address))
        self._looked_ns = 0
        self._load_file = LoadFile(load_path_of(Path(address.removeprefix("ipc://"))))

    def run(self) -> int:
        """Serve until the parent has ended (return 0), the device is beyond repair (1), or all
        models were unloaded (3).
        """
        linger_ms = 0
        try:
            while os.getppid() == self._parent:
                self.turn(_IDLE_MS)
                if (fatal := self._engine.fatal or self._chores.fatal) is not None:
                    _log.error("the runner is beyond repair: %s", fatal)
                    linger_ms = 1000
                    return 1
                if self._keepers.are_gone_for_good and not self._engine.has_work:
                    _log.info("all models that used this engine were unloaded")
                    return UNUSED
            return 0
        finally:
            self._chores.close()
            self._context.destroy(linger_ms)

    def turn(self, idle_ms: int) -> None:
        """Apply what came in, waiting up to `idle_ms` if there is no work; then run one step."""
        self._turns.count()
        if self._engine.adapters.is_loading:
            idle_ms = min(idle_ms, _LOADING_MS)
            self._engine.adapters.poll()
            self._chores.put_off()
        self._engine.adapters.take_watched()
        if self._await_work(idle_ms):
            self._receive()
            while (slack_ns := self._engine.slack_ns()) >= _MS and self._socket.poll(
                int(slack_ns / _MS)
            ):
                self._receive()
            self._publish_load()
        if self._engine.has_work:
            self._chores.put_off()
            outputs, refused = self._engine.step(), self._engine.take_rejected()
            self._adapter_counts.take(outputs, refused)
            for bridge, rejected in refused:
                if bridge in self._bridges:
                    self._send(bridge, rejected)
            made_ns = time.time_ns()
            for bridge, tokens in outputs.items():
                if bridge in self._bridges:
                    self._send(bridge, wire.StepOutputs(self._engine.num_steps, made_ns, tokens))
            self._publish_load()
        if self._followers:
            self._publish_prefixes()
        if (now := time.monotonic()) >= self._next_probe_s:
            self._next_probe_s = now + 1.0
            self._status_line.tick(self._engine.status(0, ()), now)
            self._probe(now - _SILENCE_S)

    def _await_work(self, idle_ms: int) -> bool:
        """Wait up to `idle_ms` until there is something to do; return whether there is.

        If there is nothing, a piece of the chores may run.
        """
        if self._engine.has_work or self._socket.poll(self._chores.wait_ms(idle_ms)):
            return True
        self._chores.run()
        return False

    def close(self) -> None:
        """Close the socket, for callers that use `turn` instead of `run`."""
        self._chores.close()
        self._context.destroy(0)

    # --- messages ------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(_MAX_FRAMES):
            try:
                bridge, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._looked_ns = time.monotonic_ns()
                return
            if len(frames) != 1:
                self._drop(f"{len(frames)} frames for one message")
                continue
            try:
                message = wire.decode_engine(frames[0])
            except (msgspec.DecodeError, MemoryError) as error:
                self._drop(str(error))
                continue
            if bridge in self._heard_s:
                self._heard_s[bridge] = time.monotonic()
            try:
                self._apply(bridge, message)
            except Exception:  # one message must not end the engine for all
                _log.exception("a %s message could not be applied", type(message).__name__)
                self._drop("it could not be applied")

    def _publish_load(self) -> None:
        load = self._engine.load()._replace(looked_ns=self._looked_ns)
        self._load_file.publish(load, is_idle=not self._engine.has_work)

    def _drop(self, reason: str) -> None:
        self.num_dropped += 1
        if self.num_dropped % 1000 == 1:
            _log.warning("message number %d dropped: %.200s", self.num_dropped, reason)

    def _apply(self, bridge: bytes, message: wire.EngineMessage) -> None:
        if isinstance(message, wire.Hello):
            self._greet(bridge, message)
        elif bridge not in self._bridges:
            self._drop("the sender never sent Hello")
            self._reply(bridge, wire.Refused("say Hello first: this connection is not known"))
        elif isinstance(message, wire.Submit):
            self._submit(bridge, message)
        elif isinstance(message, wire.Cancel):
            found = self._engine.cancel(bridge, message.request, message.cause, message.noticed_ns)
            self.num_unknown += not found
        elif isinstance(message, wire.Ping):
            self._send(bridge, self._status(bridge, message))
        elif isinstance(message, wire.LoadAdapter | wire.UnloadAdapter):
            self._change_adapters(bridge, message)
        else:
            self._keepers.remove(bridge, says_bye=True)
            self._disconnect(bridge, "says bye")

    def _change_adapters(
        self, bridge: bytes, message: wire.LoadAdapter | wire.UnloadAdapter
    ) -> None:
        """Start to load an adapter, or unload one, and answer."""

        def reply(error: ContractError | None) -> None:
            told = () if error is None else (error.code, error.message)
            if bridge in self._bridges:
                self._send(bridge, wire.Answered(message.number, *told))

        adapters = self._engine.adapters
        try:
            if isinstance(message, wire.LoadAdapter):
                adapters.start_load(message.name, message.path, reply)
                return
            adapters.unload(message.name)
        except ContractError as error:
            reply(error)
            return
        reply(None)

    def _publish_adapters(self, changed: list[wire.AdapterInfo], removed: list[str]) -> None:
        """Send all bridges the adapters that have changed."""
        message = wire.Adapters(changed, removed)
        for bridge in list(self._bridges):
            self._send(bridge, message)

    def _publish_prefixes(self) -> None:
        """Send what the cache has and has no more."""
        index = self._engine.prefixes
        added, removed = index.take_news()
        if added or removed:
            message = wire.Prefixes(index.key, index.block_size, False, added, removed)
            for bridge in list(self._followers):
                self._send(bridge, message)

    def _follow(self, bridge: bytes, key: bytes) -> None:
        """Send a bridge all that the cache has, and from here on what is new."""
        self._publish_prefixes()
        index = self._engine.prefixes
        whole = index.share(key)
        self._followers.add(bridge)
        self._send(bridge, wire.Prefixes(index.key, index.block_size, True, whole, []))

    def _status(self, bridge: bytes, ping: wire.Ping) -> wire.Status:
        status = self._engine.status(ping.number, self._bridge_names())
        figures = self._engine.figures(self.num_dropped) if ping.with_figures else None
        counts = self._adapter_counts.all() if ping.with_adapters else []
        more = {"requests": self._engine.requests_of(bridge), "adapter_counts": counts}
        return msgspec.structs.replace(status, figures=figures, **more)

    def _greet(self, bridge: bytes, message: wire.Hello) -> None:
        ours = (self._welcome.protocol, self._welcome.version)
        if (message.protocol, message.version) != ours:
            theirs = f"protocol {message.protocol}, version {message.version[:64]}"
            reason = f"the engine speaks protocol {ours[0]}, version {ours[1]}, the bridge {theirs}"
            self._reply(bridge, wire.Refused(reason))
            return
        if bridge in self._bridges:  # a new connection has another identity
            self._drop(f"bridge {message.bridge!r:.64} says hello again")
            return
        before = [b for b, hello in self._bridges.items() if hello.pid and hello == message]
        for identity in before:
            self._disconnect(identity, "connects anew")
        self._bridges[bridge] = message
        self._keepers.add(bridge, message)
        self._heard_s[bridge] = time.monotonic()
        _log.info("bridge %.64r is connected", message.bridge)
        adapters = self._engine.adapters.infos()
        self._send(bridge, msgspec.structs.replace(self._welcome, adapters=adapters))
        if message.prefix_key:
            self._follow(bridge, message.prefix_key)

    def _submit(self, bridge: bytes, message: wire.Submit) -> None:
        if self._engine.has_request(bridge, message.request):  # numbers are used once
            self._drop(f"request {message.request} is already running")
            return
        try:
            if self._keepers.are_gone:
                raise ContractError("the model was unloaded", Code.UNAVAILABLE)
            self._engine.submit(bridge, message)
            self._adapter_counts.start(bridge, message)
        except ContractError as error:
            rejected = wire.Rejected(message.request, error.code, error.message, error.reason)
            self._send(bridge, rejected)
        except Exception:
            _log.exception("request %d could not be queued", message.request)
            reason = "the engine could not take the request"
            self._send(bridge, wire.Rejected(message.request, Code.INTERNAL, reason))

    def _send(self, bridge: bytes, message: wire.ToBridge) -> None:
        """Send to a connected bridge; disconnect it if it cannot be reached."""
        if not self._reply(bridge, message):
            self._disconnect(bridge, "cannot be reached")

    def _reply(self, bridge: bytes, message: wire.ToBridge) -> bool:
        try:
            self._socket.send_multipart([bridge, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # no route, or too many unsent messages
            _log.warning("bridge %.64r: %s", self._bridge_name(bridge), error)
            return False
        return True

    def _probe(self, since_s: float) -> None:
        """Send to bridges not heard since `since_s`; a dead one turns out to be unreachable."""
        for bridge in [b for b, heard_s in self._heard_s.items() if heard_s < since_s]:
            self._send(bridge, self._engine.status(0, self._bridge_names()))

    def _disconnect(self, bridge: bytes, why: str) -> None:
        name = self._bridge_name(bridge)
        self._heard_s.pop(bridge, None)
        self._followers.discard(bridge)
        if not self._followers:
            self._engine.prefixes.stop_sharing()
        self._keepers.remove(bridge)
        num_requests = self._engine.cancel_bridge(bridge)
        self._adapter_counts.leave(bridge)
        if self._bridges.pop(bridge, None) is not None:
            _log.info("bridge %.64r %s; %d requests cancelled", name, why, num_requests)

    def _bridge_name(self, bridge: bytes) -> str:
        return self._bridges[bridge].bridge if bridge in self._bridges else "unknown"

    def _bridge_names(self) -> list[str]:
        return [hello.bridge for hello in self._bridges.values()]
