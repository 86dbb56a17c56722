"""`slipstream gateway` with `paced_engine.py` in the engine's place, and clients of its streams.

Clients have processes of their own; each stream has a connection of its own. An event is read when
its stream has ended: until then, only times and bytes are noted.
"""

import asyncio
import contextlib
import gc
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from paced_engine import write_python
from slipstream_compose.compose import compose
from slipstream_compose.writing import write
from slipstream_runtime.processes import num_cores
from slipstream_serve.gateway_alone import gateway_alone, wait_ready
from slipstream_serve.server import repository_root
from sse_clients import Client, request
from stream_clients import Received

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_TEXT = re.compile(rb'"(?:text|content)":"([a-zA-Z0-9]+)"')
_DONE = b"data: [DONE]"
_PROMPT = "def main():\n    "
_NS = 1_000_000_000


@dataclass(frozen=True)
class PacedGateway:
    """A running gateway.

    Attributes:
        journal: of the source, see `paced_engine`.
    """

    port: int
    process: psutil.Process
    journal: Path
    log: Path

    def cpu_s(self) -> float:
        """Return CPU seconds of the gateway's process so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_mb(self) -> float:
        """Return what the gateway's process has resident."""
        return float(self.process.memory_info().rss / 1e6)

    def num_descriptors(self) -> int:
        """Return how many files and sockets the gateway has open."""
        return int(self.process.num_fds())

    def source(self) -> psutil.Process:
        """Return the process of the source."""
        for child in self.process.children(recursive=True):
            if "slipstream.engine.process" in child.cmdline():
                return child
        raise ProcessLookupError("the gateway has no engine")


@contextlib.contextmanager
def serving(
    step_s: float | None, scratch: Path, log: Path, *options: str
) -> Iterator[PacedGateway]:
    """Run a gateway whose source makes a token a stream every `step_s` seconds.

    None: it has the real engine.
    """
    python, journal, template = scratch / "python", scratch / "journal", scratch / "chat.jinja"
    environment = dict(os.environ)
    if step_s is not None:
        write_python(python, step_s, journal)
        environment["SLIPSTREAM_PYTHON"] = str(python)
    template.write_text(_TEMPLATE)
    write(compose(CHECKPOINT, scratch / "models", {}, cores=num_cores()))
    options = ("--chat-template", str(template), *options)
    with gateway_alone(scratch / "models", log, *options, environment=environment) as found:
        process, address = found
        wait_ready(process, address, log)
        port = int(address.rpartition(":")[2])
        yield PacedGateway(port, psutil.Process(process.pid), journal, log)


# --- clients -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A stream of so many tokens, which its seed chooses."""

    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Slots:
    """Work of one client process: slots side by side, the streams of a slot one after another."""

    port: int
    dialect: str
    slots: Sequence[Sequence[Ask]]
    begin_ns: int
    timeout_s: float


def body(dialect: str, ask: Ask) -> bytes:
    """Return the request of a stream."""
    given: dict[str, object] = {"max_tokens": ask.max_tokens, "seed": ask.seed, "stream": True}
    if dialect == "chat":
        given["messages"] = [{"role": "user", "content": _PROMPT}]
    else:
        given["prompt"] = _PROMPT
    return json.dumps(given).encode()


def receive(work: Slots) -> tuple[list[Received], float]:
    """From `begin_ns` on ask and read all streams to their ends; also the CPU seconds of that."""
    time.sleep(max(0.0, (work.begin_ns - time.time_ns()) / _NS))
    gc.disable()  # while streams run
    try:
        begin_s = time.process_time()
        found = asyncio.run(receive_all(work))
        return found, time.process_time() - begin_s
    finally:
        gc.enable()


async def receive_all(work: Slots) -> list[Received]:
    """Ask and read all streams to their ends."""
    found = await asyncio.gather(*(_receive_slot(work, slot) for slot in work.slots))
    return [stream for slot in found for stream in slot]


async def _receive_slot(work: Slots, slot: Sequence[Ask]) -> list[Received]:
    return [await _receive_one(work, ask) for ask in slot]


async def _receive_one(work: Slots, ask: Ask) -> Received:
    data = request("127.0.0.1", PATHS[work.dialect], body(work.dialect, ask))
    opened_ns, error = time.time_ns(), ""
    client = Client(data)
    try:
        async with asyncio.timeout(work.timeout_s):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: client, "127.0.0.1", work.port)
            await client.ended
    except (OSError, TimeoutError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return parse(ask.seed, opened_ns, client.pieces, error)


def parse(seed: int, opened_ns: int, pieces: list[tuple[int, bytes]], error: str = "") -> Received:
    """Return a stream from what was noted of it. Each letter of its text is a token.

    An event is whole within a chunk, so that the framing of chunks is never in one.
    """
    data = b"".join(piece for _, piece in pieces)
    if not data.startswith(b"HTTP/1.1 200 "):
        error = error or f"no answer: {data[:300]!r}"
    elif _DONE not in data[-32:]:
        error = error or f"it ended without [DONE]: {data[-300:]!r}"
    events = list(_TEXT.finditer(data))
    ends = np.cumsum([len(piece) for _, piece in pieces])
    came_ns = np.array([time_ns for time_ns, _ in pieces], np.int64)
    places = np.searchsorted(ends, [event.end() for event in events])
    counts = np.array([len(event[1]) for event in events], np.int64)
    text = b"".join(event[1] for event in events)
    return Received(seed, opened_ns, came_ns[places], counts, text, error)
