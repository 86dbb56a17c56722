"""A CPU's streams through tritonserver beside the engine alone: `make bench-cpu-served`.

The model of `make chat`, in 4 bits, one thread, in one sitting: streams of 256 tokens, alone (the
engine as its process steps it) and through a server, of both wirings, by clients that read gRPC in
a process of their own. They take turns. Rates are of the tokens between the first and the last
one. The engine's processor time of a token, beside that, is not changed by other work on the
machine; of two cores a server has one for all but the engine. The last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from cpu import HERE, HOME, Worker, processor
from report import commit
from slipstream_client.cli import main as command
from slipstream_serve.chat_model import fetch
from slipstream_serve.triton import Endpoints, TritonServer
from stream_clients import Load, Prompt, Received, receive

MODELS = {"fused": "tensorrt_llm_bls", "composed": "ensemble"}
_ENGINE = b"slipstream.engine.process"
_MOST_STREAMS = 32
_TEXT = "The house at the end of the road had been empty for as long as anyone could remember. "
_NS = 1_000_000_000


def engine_pids(server: TritonServer) -> list[int]:
    """Find the processes of a server's engine."""
    pids = list(server.processes())
    return [pid for pid in pids if _ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes()]


def processor_s(pids: list[int]) -> float:
    """Return the seconds that processes, all of their threads, have computed."""
    ticks = 0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rate_of(streams: list[Received], tokens: int) -> float:
    """Return tokens a second, first to last; raises SystemExit for a stream that fails."""
    for stream in streams:
        if stream.error or stream.counts.sum() != tokens:
            raise SystemExit(f"stream {stream.seed}: {stream.counts.sum()} tokens, {stream.error}")
    count = sum(int(stream.counts[1:].sum()) for stream in streams)
    first = min(int(stream.times_ns[0]) for stream in streams)
    last = max(int(stream.times_ns[-1]) for stream in streams)
    return count * _NS / (last - first)


def through(
    pool: ProcessPoolExecutor, server: TritonServer, model: str, pids: list[int], sizes: list[int]
) -> dict[str, float]:
    """Run streams through a wiring; rate and engine's seconds a token."""
    streams, tokens = sizes
    slots = [[Prompt(number, _TEXT * (1 + number % 3), tokens)] for number in range(streams)]
    before = processor_s(pids)
    load = Load(server.endpoints.grpc, model, slots, time.time_ns() + _NS, 300.0, True, True)
    received, client_s = pool.submit(receive, load).result()
    seconds = processor_s(pids) - before
    return {
        "tok_s": rate_of(received, tokens),
        "engine_ms": 1e3 * seconds / (streams * tokens),
        "client_ms": 1e3 * client_s / (streams * tokens),
    }


def alone(worker: Worker, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Run streams of as many tokens by the engine alone."""
    answer = worker.run({"prompts": prompts, "tokens": tokens})
    count = len(prompts)
    whole = answer["first"]["cpu"] + answer["then"]["cpu"]
    rate = count * (tokens - 1) / answer["then"]["wall"]
    return {"tok_s": rate, "engine_ms": 1e3 * whole / (count * tokens), "client_ms": 0.0}


def measure(args: argparse.Namespace, repository: Path, source: Path) -> dict[str, Any]:
    """Return streams -> side -> figures of each round."""
    os.environ["SLIPSTREAM_CPU_THREADS"] = "1"
    composed = ["compose", "--checkpoint", str(source), "--output", str(repository)]
    if command([*composed, "--no-kv-cache-reuse", "--max-num-seqs", str(_MOST_STREAMS)]):
        raise SystemExit("the model could not be composed")
    python = [sys.executable, str(HERE / "cpu_worker.py"), "ours", str(source), "1"]
    worker = Worker("ours", python, 1)
    found: dict[str, Any] = {
        str(n): {side: [] for side in ("alone", *MODELS)} for n in args.streams
    }
    log = repository.parent / "server.log"
    spawn = multiprocessing.get_context("spawn")
    server = TritonServer(repository, Endpoints.free(), log)
    with server.running(timeout_s=300), ProcessPoolExecutor(1, spawn) as pool:
        pids = engine_pids(server)
        if len(pids) != 1:
            raise SystemExit(f"the server has {len(pids)} engines")
        for turn in range(args.rounds + 1):
            for streams in args.streams:
                rows = found[str(streams)]
                prompts = [[100 + i] * 20 for i in range(streams)]
                one = {"alone": alone(worker, prompts, args.tokens)}
                for wiring, model in MODELS.items():
                    one[wiring] = through(pool, server, model, pids, [streams, args.tokens])
                for side, figures in one.items():
                    if turn:  # the first is a warm-up
                        rows[side].append(figures)
    worker.end()
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the best rate and the least processor time of each side, and shares of alone."""
    out: dict[str, Any] = {}
    for streams, sides in found.items():
        best = {
            side: {
                "tok_s": round(max(each["tok_s"] for each in rows), 1),
                "median_tok_s": round(statistics.median(each["tok_s"] for each in rows), 1),
                "engine_ms": round(min(each["engine_ms"] for each in rows), 3),
            }
            for side, rows in sides.items()
        }
        for side in MODELS:
            best[side]["share"] = round(best[side]["tok_s"] / best["alone"]["tok_s"], 3)
        out[streams] = best
    return out


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256, help="of each stream (256)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a file that gets the JSON object, too")
    args = parser.parse_args()
    if not all(1 <= each <= _MOST_STREAMS for each in args.streams):
        parser.error(f"--streams {args.streams}: not all are 1 to {_MOST_STREAMS}")
    source = fetch(HOME / "chat").resolve()
    load = [round(each, 1) for each in os.getloadavg()]
    with tempfile.TemporaryDirectory(prefix="slipstream-served-") as scratch:
        rounds = measure(args, Path(scratch) / "models", source)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": load,
        "streams": summary(rounds),
    }
    for streams, sides in result["streams"].items():
        for side, figures in sides.items():
            print(f"{streams:>3} streams, {side:9} {figures}")
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
