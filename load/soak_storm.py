"""The requests of a soak on one server, and what becomes of them."""

import asyncio
import collections
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crashes import SAYS_S
from slipstream_client import AsyncSlipstreamClient, Chunk, RequestTimeoutError
from slipstream_serve.triton import TritonServer
from soak_plan import CHILD_STREAMS, Ask, Child, Prompts, Question

MAX_STREAMS = 64
DRAIN_S = 2.0  # until every block is free again
ANSWER_S = 120.0  # longer than any request takes; one that takes longer hangs
_CRASH_S = SAYS_S + 2.0  # a server that has crashed has ended by then

Answer = dict[int, str] | dict[int, tuple[int, ...]]
"""By index of the sequence: text, or token ids."""


class ServerLostError(Exception):
    """The tritonserver has ended by itself."""


@dataclass
class Took:
    """Seconds of a request that stayed to its end."""

    begin_s: float  # time.monotonic()
    first_s: float
    last_s: float
    num_tokens: int


@dataclass
class Books:
    """What outlives a server: what was asked, what the answers are, what was wrong."""

    prompts: Prompts
    references: dict[Question, Answer] = field(default_factory=dict)
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    took: list[Took] = field(default_factory=list)
    num_tokens: int = 0
    num_hung: int = 0
    num_wrong: int = 0
    num_lost: int = 0


class Storm:
    """The requests of one server."""

    def __init__(self, books: Books, server: TritonServer, client: AsyncSlipstreamClient) -> None:
        self.books = books
        self.client = client
        self._server = server

    async def learn(self, asks: list[Ask]) -> None:
        """Compute the answer of every question that is new, a few at a time."""
        books = self.books
        new = {ask.question: ask for ask in asks if ask.question not in books.references}
        gate = asyncio.Semaphore(4)

        async def one(ask: Ask) -> None:
            async with gate:
                arguments = books.prompts.arguments(ask)
                answer: Answer = {}
                async with self._watched():
                    async for chunk in self.client.stream(**arguments, timeout_s=ANSWER_S):
                        add(answer, chunk, ask)
                books.references[ask.question] = answer

        await asyncio.gather(*map(one, new.values()))

    async def run(self, items: Iterable[Ask | Child]) -> list[Ask | Child]:
        """Make the requests in their order, at most MAX_STREAMS at once, and wait for all.

        Returns those that must be made again because the server was lost.
        """
        gate = asyncio.Semaphore(MAX_STREAMS)
        tasks, again = set(), []

        async def one(item: Ask | Child, num_streams: int) -> None:
            try:
                await self.make(item)
            except ServerLostError:
                again.append(item)
            finally:
                for _ in range(num_streams):
                    gate.release()

        rest = iter(items)
        for item in rest:
            num_streams = CHILD_STREAMS if isinstance(item, Child) else 1
            for _ in range(num_streams):
                await gate.acquire()
            if again:
                again += [item, *rest]
                break
            task = asyncio.create_task(one(item, num_streams))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return again

    async def make(self, item: Ask | Child) -> bool:
        """One request, or a process of them: is all well? What is wrong goes into the books.

        Raises ServerLostError.
        """
        try:
            return await (self._kill(item) if isinstance(item, Child) else self._ask(item))
        except ServerLostError:
            raise
        except Exception as error:
            is_hung = isinstance(error, RequestTimeoutError)
            self.books.num_hung += is_hung
            self.books.num_lost += not is_hung
            self.books.problems.append(f"{item}: {type(error).__name__}: {error}")
            return False

    async def _ask(self, ask: Ask) -> bool:
        """One request, to its end or until it leaves; whether its answer is the right one."""
        books = self.books
        want = books.references[ask.question]
        timeout_s = ask.when if ask.leaving == "deadline" else ANSWER_S
        begin_s = time.monotonic()
        stream = self.client.stream(**books.prompts.arguments(ask), timeout_s=timeout_s)
        enough = ask.when * size(want) if ask.leaving in ("middle", "end") else float("inf")
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            stream.cancel()

        timer = None
        if ask.leaving == "first":
            timer = asyncio.get_running_loop().call_later(ask.when, leave)
        got: Answer = {}
        num_tokens, first_s = 0, 0.0
        try:
            async with self._watched():
                async for chunk in stream:
                    first_s = first_s or time.monotonic()
                    num_tokens += chunk.num_output_tokens or 0
                    add(got, chunk, ask)
                    if size(got) >= enough:
                        leave()
        except RequestTimeoutError:
            if ask.leaving != "deadline":
                raise
            has_left = True
        finally:
            if timer:
                timer.cancel()
            books.num_tokens += num_tokens
        books.ends[ask.leaving if has_left else "complete"] += 1
        if not has_left:
            books.took.append(Took(begin_s, first_s, time.monotonic(), num_tokens))
        is_right = is_beginning(got, want) if has_left else got == want
        if not is_right:
            books.num_wrong += 1
            books.problems.append(f"{ask}: answered {got!r:.300}, not {want!r:.300}")
        return is_right

    async def _kill(self, child: Child) -> bool:
        """A process with streams of its own, and its death."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("soak_child.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,  # Ctrl-C ends the load, not what is under way
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            requests = [self.books.prompts.arguments(ask) for ask in child.asks]
            line = json.dumps({"url": self.client.url, "requests": requests})
            process.stdin.write(line.encode() + b"\n")
            if await process.stdout.readline() != b"asked\n":
                raise RuntimeError("the child ended before it asked")
            await asyncio.sleep(child.when)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self.books.ends["killed"] += len(child.asks)
        return True

    @contextlib.asynccontextmanager
    async def _watched(self) -> Any:
        """An error inside becomes ServerLostError if the server turns out to have ended."""
        try:
            yield
        except RequestTimeoutError:
            raise
        except Exception as error:
            if await until(lambda: self._server.exit_code is not None, _CRASH_S):
                raise ServerLostError from error
            raise

    async def drain(self) -> float:
        """Seconds until nothing runs, waits or holds a block; a problem if they are too many."""
        begin = time.monotonic()
        while True:
            async with self._watched():
                state = await self.client.health()
            seconds = time.monotonic() - begin
            is_idle = state["running"] == state["waiting"] == 0
            if is_idle and state["kv_blocks_free"] == state["kv_blocks_total"]:
                return seconds
            if seconds > DRAIN_S:
                self.books.problems.append(f"not idle after {seconds:.1f} s: {state}")
                return seconds
            await asyncio.sleep(0.02)


async def until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it is so in time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def add(answer: dict[int, Any], chunk: Chunk, ask: Ask) -> None:
    """Append what a chunk brings to its sequence."""
    piece: Any = chunk.token_ids if ask.question.is_tokens else chunk.text
    index = chunk.sequence_index
    answer[index] = answer[index] + piece if index in answer else piece


def size(answer: Answer) -> int:
    """Characters or tokens of all sequences."""
    return sum(map(len, answer.values()))


def is_beginning(got: dict[int, Any], want: dict[int, Any]) -> bool:
    """Whether every sequence begins like the one that is wanted."""
    return all(i in want and got[i] == want[i][: len(got[i])] for i in got)
