"""Clients of an OpenAI endpoint that only note times and bytes while streams run.

What was noted is read when all have ended: parsing would make a client late. Each stream has a
connection of its own, as that of a user's program has.
"""

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_NS = 1_000_000_000


@dataclass(frozen=True)
class Ask:
    """A request: when it is sent, in seconds after the load's start, and its body."""

    after_s: float
    body: bytes


@dataclass(frozen=True)
class Load:
    """The work of one client process."""

    host: str
    port: int
    path: str
    asks: Sequence[Ask]
    begin_ns: int
    timeout_s: float = 600.0


@dataclass
class Streamed:
    """A stream as its client saw it; times are of `time.time_ns()`."""

    opened_ns: int
    status: int = 0
    times_ns: list[int] = field(default_factory=list)  # of each event with text
    texts: list[str] = field(default_factory=list)  # of the same events
    num_tokens: int = 0  # by `usage`
    is_done: bool = False  # `[DONE]` came
    error: str = ""


class Client(asyncio.Protocol):
    """Send one request and note what comes, and when, until the connection ends."""

    def __init__(self, request: bytes) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note what came."""
        self.pieces.append((time.time_ns(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        if not self.ended.done():
            self.ended.set_result(None)


def request(host: str, path: str, body: bytes) -> bytes:
    """Return the bytes of a request on a connection of its own."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def receive(load: Load) -> tuple[list[Streamed], float]:
    """From `begin_ns` on send all requests and read them to their ends; also the CPU seconds."""
    time.sleep(max(0.0, (load.begin_ns - time.time_ns()) / _NS))
    gc.disable()  # while streams run
    try:
        begin_s = time.process_time()
        found = asyncio.run(_receive_all(load))
        seconds = time.process_time() - begin_s
    finally:
        gc.enable()
    return [_parsed(*each) for each in found], seconds


async def _receive_all(load: Load) -> list[tuple[int, list[tuple[int, bytes]], str]]:
    return await asyncio.gather(*(_receive_one(load, ask) for ask in load.asks))


async def _receive_one(load: Load, ask: Ask) -> tuple[int, list[tuple[int, bytes]], str]:
    await asyncio.sleep(max(0.0, load.begin_ns / _NS + ask.after_s - time.time()))
    data = request(load.host, load.path, ask.body)
    opened_ns, error = time.time_ns(), ""
    client: Client | None = None
    try:
        async with asyncio.timeout(load.timeout_s):
            loop = asyncio.get_running_loop()
            _, client = await loop.create_connection(lambda: Client(data), load.host, load.port)
            await client.ended
    except (OSError, TimeoutError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return opened_ns, client.pieces if client else [], error


def _parsed(opened_ns: int, pieces: list[tuple[int, bytes]], error: str) -> Streamed:
    """Read the events of a response in chunks."""
    found = Streamed(opened_ns, error=error)
    data = b"".join(piece for _, piece in pieces)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        found.error = found.error or "no response"
        return found
    found.status = int(head.split()[1])
    if found.status != 200:
        found.error = body.decode(errors="replace")[:300]
        return found
    times = _Times(pieces)
    for end, event in _events(body, len(head) + 4):
        _note(found, times.of(end), event)
    if not found.is_done:
        found.error = found.error or "it ended without [DONE]"
    return found


def _events(body: bytes, start: int) -> list[tuple[int, bytes]]:
    """Return each `data:` of a chunked body, with where its chunk ends in the whole response."""
    text, ends, at = bytearray(), [], 0
    while at < len(body):
        size = body.find(b"\r\n", at)
        num_bytes = int(body[at:size].split(b";")[0], 16)
        line_end = size + 2
        text += body[line_end : line_end + num_bytes]
        at = line_end + num_bytes + 2
        ends.append((len(text), start + at))
    events, position, number = [], 0, 0
    for part in bytes(text).replace(b"\r\n", b"\n").split(b"\n\n"):
        position += len(part) + 2
        while number < len(ends) - 1 and ends[number][0] < position:
            number += 1
        if part.startswith(b"data: "):
            events.append((ends[number][1], part[6:]))
    return events


class _Times:
    """When each byte of a response came, for rising positions."""

    def __init__(self, pieces: list[tuple[int, bytes]]) -> None:
        self._pieces = pieces
        self._number = 0
        self._seen = len(pieces[0][1])

    def of(self, end: int) -> int:
        """Return when the byte before `end` came."""
        while self._seen < end and self._number < len(self._pieces) - 1:
            self._number += 1
            self._seen += len(self._pieces[self._number][1])
        return self._pieces[self._number][0]


def _note(found: Streamed, time_ns: int, event: bytes) -> None:
    if event == b"[DONE]":
        found.is_done = True
        return
    message = json.loads(event)
    if "error" in message:
        found.error = str(message["error"])[:300]
        return
    if message.get("usage"):
        found.num_tokens = message["usage"]["completion_tokens"]
    for choice in message.get("choices", ()):
        if text := choice.get("text") or choice.get("delta", {}).get("content"):
            found.times_ns.append(time_ns)
            found.texts.append(text)
