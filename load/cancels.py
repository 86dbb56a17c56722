"""How soon the engine knows that a client has left: `python load/cancels.py`.

Every way to leave, through every model, in the middle of a stream: while other streams move, and
alone on the server. Then a crowd that leaves at once while most of it waits: the maximum is when
the engine is rid of it. Notice is from the client's leaving to the engine's being told, by the
clocks of one machine; `steps` are those that the engine still told of the request after that.
Ends with one JSON line; 1 if a bound is exceeded.
"""

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leaving
from leaving import TOKEN_MODEL, Asked, Leaver, Server
from noting_engine import Journal, write_python
from serving import PROMPTS, REPORTS, about
from slipstream_client import SlipstreamClient
from slipstream_compose.compose import compose
from slipstream_compose.writing import write
from slipstream_preprocessing.tokenizer import load_tokenizer
from slipstream_serve.probe import first_token
from slipstream_serve.server import repository_root
from slipstream_serve.triton import Endpoints, TritonServer, check_repository
from soak_plan import MODELS

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
WAYS = ("Cancel", "Deadline", "Kill", "KillCurl", "Stop")
STOPPABLE = ("ensemble", TOKEN_MODEL)
# Milliseconds by (is fused, are others moving).
BOUNDS_MS = {(True, True): 100, (True, False): 100, (False, True): 300, (False, False): 2000}
MAX_STEPS = 2
RUNNING = 20  # requests that run at once: the rest of a crowd waits
_MAX_TOKENS = 1500
_NOTICE_S = 20.0
_CROWD_S = 120.0


class Room:
    """A server, its engine's journal, and requests with numbers of their own."""

    def __init__(self, server: Server, journal: Journal) -> None:
        self._server = server
        self._journal = journal
        self._ids = load_tokenizer(CHECKPOINT).encode(PROMPTS[0]).ids
        self._seed = 0

    def begin(self, way: str, model: str) -> tuple[int, Leaver]:
        """A client that has asked, and its seed."""
        self._seed += 1
        prompt = self._ids if model == TOKEN_MODEL else PROMPTS[0]
        asked = Asked(model, prompt, _MAX_TOKENS, self._seed)
        more = [random.uniform(0.3, 0.4)] if way == "Deadline" else []
        client: Leaver = getattr(leaving, way)(self._server, asked, *more)
        return asked.seed, client

    def ask(self, way: str, model: str) -> tuple[int, Leaver]:
        """A client that is being answered, and its seed."""
        seed, client = self.begin(way, model)
        deadline = time.monotonic() + _NOTICE_S
        while time.monotonic() < deadline:
            for entry in self._journal.read():
                if entry.get("states", {}).get(str(seed)) == "decode":
                    return seed, client
            time.sleep(0.002)
        raise RuntimeError(f"{way} of {model}: not answered within {_NOTICE_S:g} s")

    def sample(self, way: str, model: str) -> tuple[float, int]:
        """One client that leaves: notice (ms, inf for never), and steps after it."""
        seed, client = self.ask(way, model)
        time.sleep(random.uniform(0.05, 0.15))
        left_ns = client.leave()
        told = self._noted("cancel", {seed}, _NOTICE_S).get(seed)
        if told is None:
            return math.inf, 0
        time.sleep(0.05)
        client.close()
        list(self._journal.read())
        later = [
            e for e in self._journal.entries if e["what"] == "step" and e["step"] > told["step"]
        ]
        num_steps = sum(str(seed) in e["states"] for e in later)
        self._journal.entries.clear()
        return (told["t"] - left_ns) / 1e6, num_steps

    def crowd(self, model: str, number: int) -> list[tuple[float, int]]:
        """So many clients that leave at once: notices (ms, inf for never), and 0."""
        clients = dict(self.begin("Cancel", model) for _ in range(number))
        if clients.keys() - self._noted("submit", set(clients), _CROWD_S).keys():
            raise RuntimeError(f"{model}: not all of {number} reached the engine")
        left = {seed: client.leave() for seed, client in clients.items()}
        told = self._noted("cancel", set(clients), _CROWD_S)
        for client in clients.values():
            client.close()
        self._journal.entries.clear()
        ends = ((told[seed]["t"] if seed in told else math.inf) - left[seed] for seed in clients)
        return [(passed / 1e6, 0) for passed in ends]

    def _noted(self, what: str, seeds: set[int], timeout_s: float) -> dict[int, dict[str, Any]]:
        """The engine's entries of that kind, once all of them are there or time is over."""
        deadline = time.monotonic() + timeout_s
        while seeds - (found := self._journal.of(what)).keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    @contextlib.contextmanager
    def others(self, number: int) -> Iterator[None]:
        """So many streams, of all models."""
        clients = [self.ask("Cancel", MODELS[index % len(MODELS)])[1] for index in range(number)]
        try:
            yield
        finally:
            for client in clients:
                client.close()
            time.sleep(0.3)


def row(
    condition: str, model: str, way: str, samples: list[tuple[float, int]], bound: int | None
) -> dict[str, Any]:
    """Percentiles of one cell, printed too. A bound of None: nothing is promised."""
    notices = sorted(notice for notice, _ in samples)
    shown = {
        "condition": condition,
        "model": model,
        "way": way,
        "p50_ms": round(notices[len(notices) // 2], 1),
        "p99_ms": round(notices[min(len(notices) - 1, int(0.99 * len(notices)))], 1),
        "max_ms": round(notices[-1], 1),
        "steps": max(steps for _, steps in samples),
        "bound_ms": bound,
    }
    print(
        f"{condition:<12}{model:<18}{way:<10}{shown['p50_ms']:>8}{shown['p99_ms']:>8}"
        f"{shown['max_ms']:>8}{shown['steps']:>6}{bound or '':>8}",
        flush=True,
    )
    return shown


def measure(room: Room, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells."""
    rows = []
    cells = [(m, w) for m in MODELS for w in WAYS if w != "Stop" or m in STOPPABLE]
    for model in MODELS:
        room.sample("Cancel", model)
    for condition, number in (("others move", args.others), ("alone", 0)):
        count = args.samples if number else max(2, args.samples // 2)
        for model, way in cells:
            with room.others(number) if number else contextlib.nullcontext():
                samples = [room.sample(way, model) for _ in range(count)]
            bound = BOUNDS_MS[model != "ensemble", number > 0]
            rows.append(row(condition, model, way, samples, bound))
    for model in ("ensemble", "tensorrt_llm_bls"):
        samples = room.crowd(model, args.crowd)
        rows.append(row(f"{args.crowd} wait", model, "Cancel", samples, None))
    return rows


def main() -> int:
    """0 where every bound holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=20, help="of each cell (%(default)s)")
    parser.add_argument("--others", type=int, default=8, help="streams that move (%(default)s)")
    parser.add_argument("--crowd", type=int, default=800, help="clients that wait (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write(compose(CHECKPOINT, folder / "models", {"dtype": "float32", "max_num_seqs": RUNNING}))
        write_python(folder / "python", folder / "journal")
        journal = Journal(folder / "journal")
        os.environ["SLIPSTREAM_PYTHON"] = str(folder / "python")
        log = REPORTS / f"cancels-{os.getpid()}.log"
        server = TritonServer(folder / "models", Endpoints.free(), log)
        triton = stack.enter_context(server.running())
        first_token(triton.endpoints.http, check_repository(folder / "models"))
        client = stack.enter_context(SlipstreamClient(triton.endpoints.grpc))
        nursery = leaving.Nursery()
        stack.callback(nursery.close)
        place = Server(triton.endpoints.grpc, triton.endpoints.http, client, nursery)
        print(f"{'condition':<12}{'model':<18}{'way':<10}", end="")
        print(f"{'p50 ms':>8}{'p99':>8}{'max':>8}{'steps':>6}{'bound':>8}")
        rows = measure(Room(place, journal), args)
    is_within = all(
        cell["p99_ms"] <= (cell["bound_ms"] or math.inf) and cell["steps"] <= MAX_STEPS
        for cell in rows
    )
    result = about() | {"rows": rows}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
