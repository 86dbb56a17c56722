"""Publish which blocks of the KV cache can be found, as vLLM's events over ZeroMQ.

A PUB socket sends batches of three frames: the topic; a number that counts batches from 0 (8 bytes,
big-endian); and `[time in s, events, rank]` in msgpack. Events are arrays:

    ["BlockStored", hashes, parent's hash, token ids, block size, None, medium, adapter]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

A hash is the last 64 bits of a block's digest. A ROUTER socket sends batches again from a number
on, as number and payload, and then the number -1 without a payload.

A thread of its own takes what the cache has recorded (`core/block_events.py`), encodes and sends.
Neither it nor a slow subscriber makes the engine wait: what somebody misses shows as a gap.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from slipstream.config import EngineConfig, EventPorts
from slipstream.core.block_events import BlockEvents, Event, Lost, Removed, Stored
from slipstream.core.prefix import PrefixIndex
from slipstream.errors import ConfigError

_log = logging.getLogger(__name__)

_EVERY_MS = 10
_MAX_BATCH = 256  # blocks: the interpreter is held for less than a millisecond
_MAX_UNSENT = 1000  # batches to one subscriber
_MAX_KEPT = 10_000  # batches for replays
_MAX_KEPT_BYTES = 64 << 20
_MAX_REQUEST_BYTES = 1024
_END = (-1).to_bytes(8, "big", signed=True)


def publish(config: EngineConfig, model: str, index: PrefixIndex) -> "Publisher | None":
    """Publish what an empty index gets, if that is configured. Raises ConfigError."""
    if not config.kv_events:
        return None
    topic = config.kv_events_topic or f"kv@{socket.gethostname()}@{model}"
    try:
        publisher = Publisher(EventPorts.of(config.kv_events), topic, index.block_size)
    except zmq.ZMQError as error:
        raise ConfigError(f"kv_events = {config.kv_events!r} cannot be bound: {error}") from None
    index.events = publisher.events
    return publisher


class Publisher:
    """The sockets, and the thread that serves them until `close`."""

    def __init__(self, ports: EventPorts, topic: str, block_size: int) -> None:
        """Bind and start. Raises ZMQError."""
        self.events = BlockEvents()
        self._topic, self._block_size, self._rank = topic.encode(), block_size, ports.rank
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._sockets = [
                self._bind(kind, ports.host, port + ports.rank, most)
                for kind, port, most in (
                    (zmq.PUB, ports.port, _MAX_UNSENT),
                    (zmq.ROUTER, ports.replay_port, _MAX_KEPT + 1),
                )
                if port
            ]
        except zmq.ZMQError:
            self._context.destroy(0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, host: str, port: int, max_unsent: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, max_unsent)
        made.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        made.setsockopt(zmq.IPV6, int(":" in host))
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)  # one that does not read gets no more
        made.bind(f"tcp://{host}:{port}")
        return made

    def close(self) -> None:
        """End the thread and close the sockets."""
        self._is_closed = True
        self._thread.join()
        self._context.destroy(0)

    def _run(self) -> None:
        is_whole = False
        while not self._is_closed:
            try:
                if not is_whole:  # at first the cache is empty
                    self._send(encode([Lost()], self._block_size, self._rank))
                is_whole = True
                self._turn()
            except Exception:
                _log.exception("events of the KV cache could not be published")
                is_whole = False
                self._number += 1
                time.sleep(1)

    def _turn(self) -> None:
        """Answer a replay, or wait a little; then send what has collected."""
        if len(self._sockets) == 1:
            time.sleep(_EVERY_MS / 1000)
        elif self._sockets[1].poll(_EVERY_MS):
            self._replay(self._sockets[1])
        while events := self.events.take(_MAX_BATCH):
            self._number += any(isinstance(event, Lost) for event in events)
            self._send(encode(events, self._block_size, self._rank))

    def _send(self, payload: bytes) -> None:
        number, self._number = self._number, self._number + 1
        self._sockets[0].send_multipart([self._topic, number.to_bytes(8, "big"), payload])
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        while len(self._kept) > _MAX_KEPT or self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Send what is kept from the number on that a client asks for."""
        client, *frames = router.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            _log.warning("no request for a replay: %.80r", frames)
            return
        first = int.from_bytes(frames[1], "big")
        try:
            for number, payload in self._kept:
                if number >= first:
                    message = [client, b"", number.to_bytes(8, "big"), payload]
                    router.send_multipart(message, zmq.NOBLOCK)
            router.send_multipart([client, b"", _END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # gone, or it does not read
            _log.warning("a replay from batch %d ended: %s", first, error)


def encode(events: Iterable[Event], block_size: int, rank: int) -> bytes:
    """Return the payload of a batch; blocks that follow each other become one event."""
    records: list[list[Any]] = []
    last: list[Any] = [""]
    for event in events:
        match event:
            case Stored(medium, digest, parent, token_ids, adapter):
                before = None if parent is None else _hash(parent)
                ids, name = memoryview(token_ids).cast("i"), adapter or None
                if last[0] == "BlockStored" and [last[1][-1], *last[6:]] == [before, medium, name]:
                    last[1].append(_hash(digest))
                    last[3].extend(ids)
                    continue
                hashes = [_hash(digest)]
                last = ["BlockStored", hashes, before, [*ids], block_size, None, medium, name]
            case Removed(medium, digest):
                if last[0] == "BlockRemoved" and last[2] == medium:
                    last[1].append(_hash(digest))
                    continue
                last = ["BlockRemoved", [_hash(digest)], medium]
            case Lost():
                last = ["AllBlocksCleared"]
        records.append(last)
    return msgspec.msgpack.encode([time.time(), records, rank])


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
