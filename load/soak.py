"""Many requests, some left early, on a real server; then the accounts.

    python load/soak.py --requests 10000 --cancels 5000   so many, on a small KV cache
    python load/soak.py --minutes 30                      so long, at 80 % of what the server can do

Requests go to all models that generate, greedy and sampled. Those that leave do so before their
first token, in the middle, near the end, by a deadline, or because their process is killed with all
its streams. Checked: every answer is the one that the same question got undisturbed (of a request
that left, a beginning of it), every block is free soon after, and no process has more threads, file
descriptors or shared memory than before.

tritonserver itself can crash or hang under cancels (crashes.py). That is told, and counted apart
from everything else: the requests that were under way are made once more, on a new server.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import soak_timed
from crashes import Watch
from serving import REPORTS, about
from slipstream_client import AsyncSlipstreamClient
from slipstream_compose.compose import compose
from slipstream_compose.writing import write
from slipstream_runtime.processes import num_cores
from slipstream_serve.probe import first_token
from slipstream_serve.server import repository_root
from slipstream_serve.triton import Endpoints, TritonServer, check_repository
from soak_plan import Ask, Child, Prompts, draw
from soak_storm import Books, ServerLostError, Storm
from soak_watch import Held, growth, held, metric, table

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
KV_CACHE_TOKENS = 896  # about a tenth of what 64 of these requests would like
MAX_CRASHES = 1 / 250  # of the requests: more would be another bug than the one that is known
_SETTLE_S = 15.0  # until connections that were left are closed
_WARM_UP = (48, 28)  # requests, cancels: threads and buffers that a server makes once
_BATCH = 1000  # requests between two looks at the accounts
_SHOWN = 8  # of the errors
_MANY = 5000  # requests, among which some must have been preempted


@dataclass
class Accounts:
    """Accounts of all servers of a run."""

    before: Held | None = None  # of the last server
    after: Held | None = None
    drained_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    crashes: list[str] = field(default_factory=list)


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


async def count(
    server: TritonServer, books: Books, accounts: Accounts, items: list[Ask | Child], seed: int
) -> list[Ask | Child]:
    """Warm-up, accounts, the storm in batches, accounts after each.

    Returns what remains to be asked because the server was lost.
    """
    async with AsyncSlipstreamClient(server.endpoints.grpc) as client:
        storm = Storm(books, server, client)
        warm_up = draw(*_WARM_UP, seed=seed + 1)
        try:
            await storm.learn([item for item in [*warm_up, *items] if isinstance(item, Ask)])
            ends, num_tokens = books.ends.copy(), books.num_tokens
            if await storm.run(warm_up):
                return items
            books.ends, books.num_tokens = ends, num_tokens
            await storm.drain()
            await asyncio.sleep(1.0)  # connections of the dead are closed
            engine = (await client.health())["engine_pid"]
            before = accounts.before = held(server, engine)
            while items:
                batch, items = items[:_BATCH], items[_BATCH:]
                if again := await storm.run(batch):
                    return again + items
                accounts.drained_s.append(await storm.drain())
                accounts.after, grown = await settle(storm, server, before)
                books.problems += grown
                print(
                    f"soak: {books.ends.total()} requests, {len(books.problems)} wrong",
                    file=sys.stderr,
                )
            await asyncio.sleep(1.2)  # metrics are told once a second
            accounts.preemptions += int(metric(server.endpoints.metrics, "preemptions"))
        except (ServerLostError, OSError):  # the metrics are asked for without a client
            if server.exit_code is None:
                raise
        return items


def on_servers(
    sit: Callable[[TritonServer], Coroutine[Any, Any, bool]],
    options: dict[str, object],
    log: Path,
    max_crashes: int,
    problems: list[str],
) -> list[str]:
    """Run `sit` on one server after the other until it returns True; the crashes, in words.

    A server that ends otherwise than by the known crash, or one crash too many, is a problem and
    the end.
    """
    crashes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        write(compose(CHECKPOINT, repository, options, cores=num_cores()))
        while True:
            with TritonServer(repository, Endpoints.free(), log).running() as server:
                first_token(server.endpoints.http, check_repository(repository))
                with Watch(server) as watch:
                    is_done = asyncio.run(sit(server))
                if is_done:
                    return crashes
                crash = watch.crash
                if not crash or len(crashes) == max_crashes:
                    problems.append(f"the server has died: {server.reason()}")
                    return crashes
                crashes.append(f"{time.strftime('%H:%M:%S')} {crash}")
                kept = log.with_name(f"{log.stem}-crash-{len(crashes)}{log.suffix}")
                log.replace(kept)
                print(
                    f"soak: tritonserver failed by itself: {crash} ({kept}); on a new one",
                    file=sys.stderr,
                )


def run(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """So many requests; the result."""
    books, accounts = Books(Prompts(CHECKPOINT)), Accounts()
    items = draw(args.requests, args.cancels, args.seed)

    async def sit(server: TritonServer) -> bool:
        nonlocal items
        items = await count(server, books, accounts, items, args.seed)
        return not items and server.exit_code is None

    options = {"kv_cache_tokens": KV_CACHE_TOKENS, "dtype": "float32"}
    begin = time.monotonic()
    max_crashes = 1 + int(args.requests * MAX_CRASHES)
    accounts.crashes = on_servers(sit, options, log, max_crashes, books.problems)
    before, after = accounts.before or Held(), accounts.after or Held()
    if not accounts.preemptions and args.requests >= _MANY:
        books.problems.append("nothing was preempted: the run shows less than it should")
    return {
        "requests": args.requests,
        "cancels": args.cancels,
        "seed": args.seed,
        "questions": len(books.references),
        "seconds": round(time.monotonic() - begin, 1),
        "tokens": books.num_tokens,
        "ends": dict(sorted(books.ends.items())),
        "preemptions": accounts.preemptions,
        "drained_s": round(max(accounts.drained_s, default=0.0), 3),
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
        "crashes of tritonserver itself": accounts.crashes,
        "table": table(before, after),
        "problems": books.problems,
    }


def run_timed(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """So long; the result."""
    timed = soak_timed.Timed(Books(Prompts(CHECKPOINT)), args.minutes * 60, args.seed)
    max_crashes = 2 + int(args.minutes)
    crashes = on_servers(timed.sit, {"dtype": "float32"}, log, max_crashes, timed.books.problems)
    return timed.result(crashes)


def main() -> int:
    """0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--cancels", type=int, help="of them leave early (default: a third)")
    parser.add_argument("--minutes", type=float, help="run so long, instead of so many requests")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    if args.cancels is None:
        args.cancels = args.requests // 3
    if not 0 <= args.cancels <= args.requests:
        parser.error(f"--cancels is {args.cancels}, not 0 to {args.requests}")
    log = REPORTS / f"soak-{os.getpid()}-tritonserver.log"
    result = about() | (run_timed(args, log) if args.minutes else run(args, log))
    print(result.pop("table"))
    problems = result["problems"]
    for line in problems[:_SHOWN]:
        print(f"soak: {line}", file=sys.stderr)
    if len(problems) > _SHOWN:
        print(f"soak: and {len(problems) - _SHOWN} more", file=sys.stderr)
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
