"""Thousands of requests, valid and not, drawn over the whole contract; what must never come of any.

    python load/fuzz.py --requests 100000

Each is drawn with its outcome (see fuzz_cases.py): one without a fault must be answered completely,
one with faults must be refused by an error that names the field of one of them. No error may be an
internal one, hold a path or a traceback, quote a value at length or have another status than is
documented (see fuzz_judge.py); no process may end; a canary of each model must have
the same answer all along; and in the end every block must be free.

tritonserver 24.10 itself can crash (crashes.py): that is counted apart, and a new server goes on.
"""

import asyncio
import collections
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crashes import Watch
from fuzz_cases import GENERATING, Case, Given, cases
from fuzz_judge import judge
from fuzz_send import Sender
from serving import REPORTS, fuzz
from slipstream_client import SlipstreamClient
from slipstream_compose.compose import compose
from slipstream_compose.writing import write
from slipstream_runtime.processes import num_cores
from slipstream_serve.server import repository_root
from slipstream_serve.triton import Endpoints, TritonServer

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
KV_CACHE_TOKENS = 1536  # less than the context of 2,048: prompts can fit the one and not the other
_AT_ONCE = 24
_DRAWN = 2000  # cases at once
_ROUND = 500  # cases between two looks at the processes
_CANARY_EVERY = 25  # cases
_IDLE_S = 20.0
_SHOWN = 12
_MAX_CRASHES = 3


@dataclass
class Books:
    """What came of all requests."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    canaries: int = 0
    references: dict[str, Any] = field(default_factory=dict)


def canary(model: str) -> Case:
    """A fixed question, greedy, whose answer never changes."""
    size = [1] if model == "vllm_model" else [1, 1]
    text = b"def read(path):\n    "
    prompt = Given("text_input", "BYTES", size, [text], len(text).to_bytes(4, "little") + text)
    wanted = Given("max_tokens", "INT32", size, [12], (12).to_bytes(4, "little"))
    case = Case(model, "grpc", tensors=[prompt, wanted])
    if model == "vllm_model":
        asked = b'{"max_tokens": 12, "temperature": 0}'
        raw = len(asked).to_bytes(4, "little") + asked
        case.tensors[1] = Given("sampling_parameters", "BYTES", size, [asked], raw)
    if model == "tensorrt_llm":
        ids = b"".join(token.to_bytes(4, "little") for token in (290, 293, 8))
        wanted.name = "request_output_len"
        case.tensors[0] = Given("input_ids", "INT32", [1, 3], [290, 293, 8], ids)
        case.tensors.append(Given("input_lengths", "INT32", size, [3], (3).to_bytes(4, "little")))
    return case


class Run:
    """Cases against one server."""

    def __init__(self, server: TritonServer, sender: Sender, books: Books) -> None:
        self._server = server
        self._sender = sender
        self._books = books
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._stubs = server.stubs()
        self._health = self.health()

    def health(self) -> dict[str, Any]:
        """What the engine says of itself."""
        with SlipstreamClient(self._server.endpoints.grpc, timeout_s=30) as client:
            return client.health()

    async def ask(self, case: Case) -> Case | None:
        """One case; returned if the server was lost before its end."""
        async with self._slots:
            outcome = await self._sender.send(case)
        if outcome.is_lost:
            return case
        problem = judge(case, outcome)
        if problem:
            self._books.problems.append(f"{problem}\n    {str(case)[:1500]}")
        kind = "changed" if case.mutation else "refused" if outcome.error else "served"
        self._books.ends[f"{case.model} {kind}"] += 1
        return None

    async def ask_canary(self, model: str) -> None:
        """Check that the canary's answer is what it was at the start."""
        outcome = await self._sender.send(canary(model))
        if outcome.is_lost:
            return
        answer = [response for response in outcome.responses if response]
        told = [{n: v for n, v in each.items() if n != "STREAM_STATE"} for each in answer]
        self._books.canaries += 1
        if not told or told != self._books.references.setdefault(model, told):
            self._books.problems.append(f"the canary of {model}: {outcome.error or told}")

    async def round(self, batch: list[Case]) -> list[Case]:
        """Many at once, canaries among them; returns those to be asked again."""
        asks: list[Any] = []
        for number, case in enumerate(batch):
            asks.append(self.ask(case))
            if number % _CANARY_EVERY == 0:
                asks.append(self.ask_canary(GENERATING[number // _CANARY_EVERY % len(GENERATING)]))
        return [case for case in await asyncio.gather(*asks) if case is not None]

    async def settle(self) -> None:
        """Every block must be free again and every process the one it was."""
        begin = time.monotonic()
        while True:
            state = await asyncio.to_thread(self.health)
            if state["kv_blocks_free"] == state["kv_blocks_total"] and not state["running"]:
                break
            if time.monotonic() - begin > _IDLE_S:
                self._books.problems.append(f"not idle after {_IDLE_S:g} s: {state}")
                break
            await asyncio.sleep(0.02)
        if state["engine_pid"] != self._health["engine_pid"]:
            self._books.problems.append("the engine was restarted")
        if self._server.stubs() != self._stubs:
            self._books.problems.append(f"stubs: {self._stubs} -> {self._server.stubs()}")
        for log in (self._server.log, self._server.runtime.log):
            if "Traceback" in log.read_text(errors="replace"):
                self._books.problems.append(f"a traceback in {log.name}")


async def storm(server: TritonServer, books: Books, left: list[Case]) -> list[Case]:
    """All cases on one server, as long as it lives; returns what is left to ask."""
    async with Sender(server.endpoints) as sender:
        run = Run(server, sender, books)
        for model in GENERATING:
            await run.ask_canary(model)
        while left:
            batch, left = left[:_ROUND], left[_ROUND:]
            again = await run.round(batch)
            if again or server.exit_code is not None:
                await asyncio.sleep(2.0)  # one that crashes writes its stack first
                if server.exit_code is None:
                    books.problems.append(f"connections were refused: {str(again[:1])[:1500]}")
                return again + left
            await run.settle()
            if len(books.problems) > _SHOWN:
                return []
    return []


def batches(requests: int, number: int) -> Iterator[list[Case]]:
    """All cases, drawn when they are needed."""
    for first in range(0, requests, _DRAWN):
        yield list(cases(min(_DRAWN, requests - first), number + first))


def on_servers(repository: Path, log: Path, books: Books, drawn: Iterator[list[Case]]) -> None:
    """Ask all on one server, and on the next where tritonserver crashes by itself."""
    left: list[Case] = []
    while True:
        name = f"{log.name}-{len(books.crashes)}" if books.crashes else log.name
        server = TritonServer(repository, Endpoints.free(), log.with_name(name))
        with server.running(), Watch(server) as watch:
            while (
                server.exit_code is None
                and not books.problems
                and (left or (left := next(drawn, [])))
            ):
                left = asyncio.run(storm(server, books, left))
                print(f"fuzz: {sum(books.ends.values())} requests", file=sys.stderr)
            if server.exit_code is None:
                return
            books.crashes.append(server.reason())
            if not watch.crash or len(books.crashes) > _MAX_CRASHES:
                books.problems.append(f"the server has died: {server.reason()}")
                return


def run(requests: int, number: int, log: Path) -> dict[str, Any]:
    """Everything; the result."""
    begin = time.monotonic()
    books = Books()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        options: dict[str, object] = {"kv_cache_tokens": KV_CACHE_TOKENS, "dtype": "float32"}
        write(compose(CHECKPOINT, repository, options, cores=num_cores()))
        on_servers(repository, log, books, batches(requests, number))
    return {
        "requests": sum(books.ends.values()),
        "seed": number,
        "seconds": round(time.monotonic() - begin, 1),
        "ends": dict(sorted(books.ends.items())),
        "canaries": books.canaries,
        "crashes of tritonserver by itself": books.crashes,
        "problems": books.problems[:_SHOWN],
    }


if __name__ == "__main__":
    sys.exit(fuzz(__doc__.split("\n", 1)[0], run, REPORTS / "fuzz-tritonserver.log"))
