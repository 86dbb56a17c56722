"""Many requests, some left early, on a server with a small KV cache; then the accounts.

Requests go to all models that generate, at most 64 streams at once, greedy and sampled. Those that
leave do so before their first token, in the middle, near the end, by a deadline, or because their
process is killed with all its streams. Checked: every answer is the one that the same question got
undisturbed (of a request that left, a beginning of it), every block is free soon after, and no
process has more threads, file descriptors or shared memory than before.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import REPORTS
from slipstream_client import AsyncSlipstreamClient, Chunk, ContractError, RequestTimeoutError
from slipstream_compose.compose import compose, write
from slipstream_compose.probe import first_token
from slipstream_compose.server import repository_root
from slipstream_compose.triton import Endpoints, TritonServer, check_repository
from soak_plan import CHILD_STREAMS, Ask, Child, Prompts, Question, draw
from soak_watch import Held, growth, held, metric, table

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
KV_CACHE_TOKENS = 1280  # about a tenth of what 64 of these requests would like
MAX_STREAMS = 64
DRAIN_S = 2.0  # until every block is free again
_ANSWER_S = 120.0  # longer than any request takes; one that takes longer is lost
_SETTLE_S = 15.0  # until connections that were left are closed
_WARM_UP = (48, 28)  # requests, cancels: threads and buffers that a server makes once
_SHOWN = 8  # of the errors
_CRASH_S = 5.0
_MANY = 500  # requests, among which some must have been preempted
_TOLD_EVERY = 1000  # requests

Answer = dict[int, str] | dict[int, tuple[int, ...]]
"""By index of the sequence: text, or token ids."""


@dataclass
class Storm:
    """The requests of a run on one server, and what became of them."""

    client: AsyncSlipstreamClient
    prompts: Prompts
    references: dict[Question, Answer] = field(default_factory=dict)
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    num_tokens: int = 0

    async def learn(self, items: list[Ask | Child]) -> None:
        """Compute the answer of every question that is new, a few at a time."""
        new = {item.question: item for item in items if isinstance(item, Ask)}
        gate = asyncio.Semaphore(4)

        async def one(ask: Ask) -> None:
            async with gate:
                stream = self.client.stream(**self.prompts.arguments(ask), timeout_s=_ANSWER_S)
                answer: Answer = {}
                async for chunk in stream:
                    add(answer, chunk, ask)
                self.references[ask.question] = answer

        await asyncio.gather(*(one(new[key]) for key in new.keys() - self.references.keys()))

    async def run(self, items: list[Ask | Child]) -> None:
        """Make the requests in their order, at most MAX_STREAMS at once, and wait for all."""
        gate = asyncio.Semaphore(MAX_STREAMS)
        tasks = set()

        async def one(item: Ask | Child, num_streams: int) -> None:
            try:
                await (self._kill(item) if isinstance(item, Child) else self._ask(item))
            except Exception as error:
                self.problems.append(f"{item}: {type(error).__name__}: {error}")
            finally:
                for _ in range(num_streams):
                    gate.release()

        num_made = 0
        for item in items:
            num_streams = CHILD_STREAMS if isinstance(item, Child) else 1
            if num_made // _TOLD_EVERY < (num_made := num_made + num_streams) // _TOLD_EVERY:
                print(f"soak: {num_made} requests, {len(self.problems)} wrong", file=sys.stderr)
            for _ in range(num_streams):
                await gate.acquire()
            task = asyncio.create_task(one(item, num_streams))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _ask(self, ask: Ask) -> None:
        """One request, to its end or until it leaves."""
        want = self.references[ask.question]
        timeout_s = ask.when if ask.leaving == "deadline" else _ANSWER_S
        stream = self.client.stream(**self.prompts.arguments(ask), timeout_s=timeout_s)
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
        try:
            async for chunk in stream:
                self.num_tokens += chunk.num_output_tokens or 0
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
        self.ends[ask.leaving if has_left else "complete"] += 1
        if not (is_beginning(got, want) if has_left else got == want):
            self.problems.append(f"{ask}: answered {got!r:.300}, not {want!r:.300}")

    async def _kill(self, child: Child) -> None:
        """A process with streams of its own, and its death."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("soak_child.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            requests = [self.prompts.arguments(ask) for ask in child.asks]
            line = json.dumps({"url": self.client.url, "requests": requests})
            process.stdin.write(line.encode() + b"\n")
            if await process.stdout.readline() != b"asked\n":
                raise RuntimeError("the child ended before it asked")
            await asyncio.sleep(child.when)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self.ends["killed"] += len(child.asks)

    async def drain(self) -> float:
        """Seconds until nothing runs, waits or holds a block; a problem if they are too many."""
        begin = time.monotonic()
        while True:
            state = await self.client.health()
            seconds = time.monotonic() - begin
            is_idle = state["running"] == state["waiting"] == 0
            if is_idle and state["kv_blocks_free"] == state["kv_blocks_total"]:
                return seconds
            if seconds > DRAIN_S:
                self.problems.append(f"not idle after {seconds:.1f} s: {state}")
                return seconds
            await asyncio.sleep(0.02)


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


async def settle(storm: Storm, server: TritonServer, before: Held) -> tuple[Held, list[str]]:
    """What the server holds once nothing has grown, or after _SETTLE_S; and what has grown."""
    begin = time.monotonic()
    engine = (await storm.client.health())["engine_pid"]
    while True:
        after = held(server, engine)
        lines = growth(before, after)
        if not lines or time.monotonic() - begin > _SETTLE_S:
            return after, lines
        await asyncio.sleep(0.25)


async def soak(server: TritonServer, args: argparse.Namespace) -> dict[str, Any]:
    """Warm-up, accounts, the storm, accounts again; what is wrong is in `problems`."""
    warm_up = draw(*_WARM_UP, seed=args.seed + 1)
    items = draw(args.requests, args.cancels, args.seed)
    async with AsyncSlipstreamClient(server.endpoints.grpc) as client:
        storm = Storm(client, Prompts(CHECKPOINT))
        await storm.learn([*warm_up, *items])
        await storm.run(warm_up)
        await storm.drain()
        await asyncio.sleep(1.0)  # connections of the dead are closed
        engine = (await client.health())["engine_pid"]
        before, preempted = (
            held(server, engine),
            metric(server.endpoints.metrics, "num_preemptions"),
        )
        storm.ends.clear()
        storm.num_tokens = 0
        begin = time.monotonic()
        await storm.run(items)
        seconds = time.monotonic() - begin
        drained_s = await storm.drain()
        await asyncio.sleep(1.2)  # metrics are told once a second
        preempted = metric(server.endpoints.metrics, "num_preemptions") - preempted
        after, grown = await settle(storm, server, before)
    problems = [*storm.problems, *grown]
    if not preempted and args.requests >= _MANY:
        problems.append("nothing was preempted: the run shows less than it should")
    return {
        "requests": args.requests,
        "seed": args.seed,
        "questions": len(storm.references),
        "seconds": round(seconds, 1),
        "tokens": storm.num_tokens,
        "ends": dict(sorted(storm.ends.items())),
        "preemptions": int(preempted),
        "drained_s": round(drained_s, 3),
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
        "table": table(before, after),
        "problems": problems,
    }


def has_ended(server: TritonServer) -> bool:
    """Whether it has; one that crashes writes its stack first."""
    deadline = time.monotonic() + _CRASH_S
    while server.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return server.exit_code is not None


def run(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """`soak` on a server of its own; the result."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        options = {"kv_cache_tokens": KV_CACHE_TOKENS, "dtype": "float32"}
        write(compose(CHECKPOINT, repository, options))
        server = TritonServer(repository, Endpoints.free(), log)
        try:
            server.start()
            server.wait_ready(timeout_s=300)
            first_token(server.endpoints.http, check_repository(repository))
            try:
                return asyncio.run(soak(server, args))
            except ContractError as error:
                if not has_ended(server):
                    raise
                reason = f"the server has died: {server.reason()}"
                return {"seed": args.seed, "table": str(error), "problems": [reason]}
        finally:
            server.stop()


def main() -> int:
    """0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--cancels", type=int, help="of them leave early (default: a third)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args()
    if args.cancels is None:
        args.cancels = args.requests // 3
    if not 0 <= args.cancels <= args.requests:
        parser.error(f"--cancels is {args.cancels}, not 0 to {args.requests}")
    result = run(args, REPORTS / "soak-tritonserver.log")
    print(result.pop("table"))
    problems = result["problems"]
    for line in problems[:_SHOWN]:
        print(f"soak: {line}", file=sys.stderr)
    if len(problems) > _SHOWN:
        print(f"soak: and {len(problems) - _SHOWN} more", file=sys.stderr)
    print(json.dumps(result))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
