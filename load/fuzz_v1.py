"""Thousands of requests to the gateway's endpoints, valid and not; what must never come of any.

    python load/fuzz_v1.py --requests 100000

Each is drawn with its outcome (see fuzz_v1_cases.py): one without a fault is answered completely,
one with a fault refused with status 4xx and OpenAI's error body, whose `param` is the wrong field.
One whose text or surroundings were changed may come to anything but an internal error. No error may
hold a path or a traceback, or be long; the log may hold no traceback; a canary must have the same
answer all along; after each 500 no request is open and every block of the engine is free, and the
memory of the gateway's process is noted: after it is warm it must not grow with requests.
"""

import asyncio
import collections
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from fuzz_v1_cases import CHATS, COMPLETIONS, Case, cases
from serving import REPORTS, fuzz
from slipstream_compose.compose import compose
from slipstream_compose.writing import write
from slipstream_runtime.processes import num_cores
from slipstream_serve.gateway_alone import gateway_alone, wait_ready
from slipstream_serve.server import repository_root

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_AT_ONCE = 24
_ROUND = 500
_CANARY_EVERY = 25
_TIMEOUT_S = 60.0
_SHORT_S = 1.0  # for what may be no whole request
_IDLE_S = 30.0
_WARM = 2  # rounds after which allocators have what they use again and again
_GROWTH_MB = 24.0  # from then on; a leak of 6 KB a request is found by 4,000
_SHOWN = 12
_LONGEST = 800  # characters of an error
_NEVER = ("Traceback", 'File "', ".py", "could not be started", "could not be made")
_CANARY = Case(data=b'{"prompt": "def read(path):\\n    ", "max_tokens": 12, "temperature": 0}')
_FIGURE = re.compile(r"^slipstream_gateway_(\w+)(?:\{[^}]*\})? (\S+)$", re.M)


@dataclass
class Answer:
    """A response as it came."""

    status: int
    headers: dict[bytes, bytes]
    data: bytes


@dataclass
class Books:
    """What came of all requests."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    canaries: int = 0
    reference: str = ""
    resident_mb: list[float] = field(default_factory=list)  # of the gateway, after each round

    def check_memory(self) -> None:
        """Note a problem where the gateway has grown since it was warm."""
        warm = self.resident_mb[_WARM:]
        if warm and warm[-1] - warm[0] > _GROWTH_MB:
            self.problems.append(f"the gateway has grown: {self.resident_mb} MB")


@contextlib.contextmanager
def serving(scratch: Path, log: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run a gateway with the real engine of the default model; its port and its process.

    Raises ServeError, SystemExit.
    """
    options: dict[str, object] = {"kv_cache_tokens": 8192, "deterministic": True}
    write(compose(CHECKPOINT, scratch / "models", options, cores=num_cores()))
    template = scratch / "chat.jinja"
    template.write_text(_TEMPLATE)
    with gateway_alone(scratch / "models", log, "--chat-template", str(template)) as found:
        process, address = found
        wait_ready(process, address, log)
        yield int(address.rpartition(":")[2]), psutil.Process(process.pid)
        if process.poll() is not None:
            raise SystemExit(f"the gateway has ended: {log.read_text()[-4000:]}")


# --- one request ---------------------------------------------------------------------------------


async def send(port: int, case: Case) -> list[Answer] | str:
    """Return the answers to a case, or why there are none."""
    is_odd = bool(case.head or case.headers) or case.method not in ("POST", "GET")
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    answers: list[Answer] = []
    try:
        writer.write(case.message())
        async with asyncio.timeout(_SHORT_S if is_odd else _TIMEOUT_S):
            for _ in range(case.repeat):
                answers.append(await _read(reader, case.method == "HEAD"))
                if answers[-1].headers.get(b"connection") == b"close":
                    break
    except (TimeoutError, OSError, EOFError, ValueError) as error:
        return answers if answers and is_odd else f"{type(error).__name__}: {error}"
    finally:
        writer.close()
    return answers


async def _read(reader: asyncio.StreamReader, is_head: bool) -> Answer:
    """Read one response. Raises EOFError, ValueError where it is none."""
    head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    if not re.fullmatch(rb"HTTP/1\.1 \d{3} [ -~]*", head[0]):
        raise ValueError(f"no status line: {head[0][:100]!r}")
    pairs = (line.partition(b":") for line in head[1:] if line)
    headers = {name.lower(): value.strip().lower() for name, _, value in pairs}
    status = int(head[0].split()[1])
    if status == 100:
        return await _read(reader, is_head)
    if is_head or status in (204, 304):
        return Answer(status, headers, b"")
    if headers.get(b"transfer-encoding") != b"chunked":
        length = headers.get(b"content-length")
        data = await (reader.read() if length is None else reader.readexactly(int(length)))
        return Answer(status, headers, data)
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk without its end")
    await reader.readline()
    return Answer(status, headers, b"".join(parts))


# --- the judge -----------------------------------------------------------------------------------


def judge(case: Case, answers: list[Answer] | str) -> str:
    """Return what is wrong with the answers to a case; nothing where they are as they must be."""
    is_odd = bool(case.head or case.headers) or case.method not in ("POST", "GET")
    if isinstance(answers, str):  # a changed body may ask for thousands of tokens
        is_long = case.is_changed and answers.startswith(TimeoutError.__name__)
        return "" if is_odd or is_long else f"no answer: {answers}"
    if not case.is_changed and len(answers) != case.repeat:
        return f"{len(answers)} answers to {case.repeat} requests"
    for answer in answers:
        if fault := _fault(case, answer, is_odd):
            return f"status {answer.status}: {fault}: {answer.data[-300:]!r}"
    return ""


def _fault(case: Case, answer: Answer, is_odd: bool) -> str:
    if answer.status >= 500:  # an engine may be busy for the second that a health check waits
        return "" if (case.path, answer.status) == ("/health", 503) else "internal"
    if answer.status >= 400:
        return _refusal(case, answer, is_odd)
    if case.is_changed:
        return ""
    if case.faults:
        return f"was served in spite of {case.faults}"
    return _answer_fault(case, answer.data)


def _refusal(case: Case, answer: Answer, is_odd: bool) -> str:
    if not answer.data or answer.headers.get(b"content-type", b"") != b"application/json":
        return "" if is_odd else "no JSON"
    error = json.loads(answer.data)["error"]
    is_messages = case.path.startswith("/v1/messages")
    wanted = {"message", "type"} if is_messages else {"message", "type", "param", "code"}
    if not wanted <= error.keys() or not isinstance(error["message"], str):
        return "not the shape of an error"
    message = error["message"]
    if any(word in message for word in _NEVER) or str(repository_root()) in message:
        return "says too much"
    if len(message) > _LONGEST:
        return f"has {len(message)} characters"
    if case.is_changed:
        return ""
    if not case.faults:
        return "was refused"
    param = str(error.get("param"))
    if not any(param == name or param.startswith((f"{name}.", f"{name}[")) for name in case.faults):
        return f"param is {param}, not of {case.faults}"
    return ""


def _answer_fault(case: Case, data: bytes) -> str:
    if case.is_streaming:
        if case.path in (COMPLETIONS, CHATS) and not data.endswith(b"data: [DONE]\n\n"):
            return "no end of a stream"
        return "an error in a stream" if b'"error":{' in data else ""
    if not isinstance(json.loads(data), dict):
        return "not an object"
    return ""


# --- many ----------------------------------------------------------------------------------------


class Run:
    """Cases against one gateway."""

    def __init__(self, port: int, books: Books, log: Path) -> None:
        self._port = port
        self._books = books
        self._log = log
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(self, case: Case) -> None:
        """Send one case and judge it."""
        async with self._slots:
            answers = await send(self._port, case)
        try:
            problem = judge(case, answers)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"an answer that cannot be read: {error!r}: {str(answers)[:300]}"
        if problem:
            self._books.problems.append(f"{problem}\n    {str(case)[:1200]}")
        kind = "changed" if case.is_changed else "refused" if case.faults else "served"
        self._books.ends[f"{case.path if len(case.path) < 40 else 'other'} {kind}"] += 1

    async def ask_canary(self) -> None:
        """Check that the canary's text is what it was at the start."""
        async with self._slots:
            answers = await send(self._port, _CANARY)
        said = str(answers)
        if not isinstance(answers, str) and answers[0].status == 200:
            said = json.loads(answers[0].data)["choices"][0]["text"]
            self._books.reference = self._books.reference or said
        self._books.canaries += 1
        if said != self._books.reference:
            self._books.problems.append(f"the canary: {said[:300]}")

    async def round(self, batch: list[Case]) -> None:
        """Send many at once, canaries among them; then the gateway must come to rest."""
        asks: list[Any] = []
        for number, case in enumerate(batch):
            if number % _CANARY_EVERY == 0:
                asks.append(self.ask_canary())
            asks.append(self.ask(case))
        await asyncio.gather(*asks)
        await self._settle()
        if "Traceback" in self._log.read_text(errors="replace"):
            self._books.problems.append("a traceback in the log")

    async def _settle(self) -> None:
        deadline = time.monotonic() + _IDLE_S
        while True:
            health = await send(self._port, Case("GET", "/health"))
            page = await send(self._port, Case("GET", "/metrics"))
            assert not isinstance(page, str)
            assert not isinstance(health, str)
            found = dict(_FIGURE.findall(page[0].data.decode()))
            is_free = found["engine_kv_blocks_free"] == found["engine_kv_blocks"]
            busy = [float(found[n]) for n in ("open_requests", "engine_running", "engine_waiting")]
            if health[0].status == 200 and is_free and not any(busy):
                return
            if time.monotonic() > deadline:
                self._books.problems.append(f"not at rest: {health[0].status} {found}")
                return
            await asyncio.sleep(0.05)


def run(requests: int, number: int, log: Path) -> dict[str, Any]:
    """Send all; the result."""
    begin, books = time.monotonic(), Books()
    log.parent.mkdir(parents=True, exist_ok=True)

    async def storm(port: int, gateway: psutil.Process) -> None:
        each = Run(port, books, log)
        await each.ask_canary()
        for first in range(0, requests, _ROUND):
            batch = await asyncio.to_thread(
                lambda at=first: list(cases(min(_ROUND, requests - at), number + at))
            )
            await each.round(batch)
            books.resident_mb.append(round(gateway.memory_info().rss / 1e6, 1))
            print(f"fuzz: {sum(books.ends.values())} requests to /v1", file=sys.stderr, flush=True)
            if len(books.problems) > _SHOWN:
                return

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), log) as found:
        asyncio.run(storm(*found))
    books.check_memory()
    return {
        "requests": sum(books.ends.values()),
        "seed": number,
        "seconds": round(time.monotonic() - begin, 1),
        "ends": dict(sorted(books.ends.items())),
        "canaries": books.canaries,
        "resident_mb": books.resident_mb,
        "problems": books.problems[:_SHOWN],
    }


if __name__ == "__main__":
    sys.exit(fuzz(__doc__.split("\n", 1)[0], run, REPORTS / f"fuzz-v1-{os.getpid()}.log"))
