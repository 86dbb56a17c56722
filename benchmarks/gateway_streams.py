"""What the gateway adds to a stream: `python benchmarks/gateway_streams.py [--seconds 300]`.

`slipstream gateway` with `paced_engine.py` in the engine's place: nothing is computed, every stream
is owed one token a step, and what is late was made late between the engine's socket and the client.
No tritonserver is needed. The clients are processes of their own on the same machine; they only
note times and bytes while streams run.

A token's delay is from its making in the source until its client's process has it. CPU is that of
the gateway's process, without source and clients. Figures are of the window in which every stream
runs. A row fails if a text is not the one that was made, token for token. Exit code 1: something
grows.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from paced_engine import expected_bytes
from paced_gateway import PATHS, Ask, PacedGateway, Slots, receive, serving
from report import RESULTS, commit
from slipstream_serve.server import repository_root
from stream_clients import Received, lengths_of
from stream_figures import Handed, figures, has_many_cores, read_journal

OUT = repository_root() / "benchmarks" / "out"
SHOWN = ("p50_ms", "p99_ms", "gateway_cores", "us_token", "tok_event", "first_p50_ms")
GOALS: dict[bool, dict[str, float]] = {  # whether there are many cores: figure -> most
    True: {"p50_ms": 3, "p99_ms": 12, "gateway_cores": 0.25, "is_growing": 0},
    False: {"p99_ms": 60, "us_token": 10, "is_growing": 0},
}
_ROW = "256x100"
_SESSION_S = 20  # of a stream, at most
_OPENING_S = 3.0  # for the clients' imports
_MB_GROWN = 16  # between the second and the last quarter of a row
_NS = 1_000_000_000


def slots_of(num_streams: int, rate: int, seconds: float) -> list[list[Ask]]:
    """Return what is asked; in a long row a slot's streams follow one another."""
    total, longest = round(seconds * rate), _SESSION_S * rate
    slots = []
    for number in range(num_streams):
        lengths = lengths_of(number, num_streams, total, longest)
        seeds = (number + num_streams * turn for turn in range(len(lengths)))
        slots.append([Ask(*each) for each in zip(seeds, lengths, strict=True)])
    return slots


def watch(gateway: PacedGateway, seconds: float) -> dict[str, Any]:
    """Return the gateway's CPU time and memory over a time, and the tokens that the source made."""
    begin_s, cpu_s, samples = time.monotonic(), gateway.cpu_s(), []
    source = gateway.source()
    source_s = sum(source.cpu_times()[:2])
    while (spent_s := time.monotonic() - begin_s) < seconds:
        samples.append(gateway.resident_mb())
        time.sleep(min(0.5, max(0.0, seconds - spent_s)))
    quarters = [float(np.mean(part)) for part in np.array_split(samples, 4) if len(part)]
    is_rising = quarters == sorted(quarters) and quarters[-1] - quarters[1] > _MB_GROWN
    return {
        "cpu_s": gateway.cpu_s() - cpu_s,
        "watched_s": spent_s,
        "source_cores": round((sum(source.cpu_times()[:2]) - source_s) / spent_s, 3),
        "gateway_mb": [round(quarter, 1) for quarter in quarters],
        "is_memory_growing": is_rising,
    }


def check(streams: list[Received], slots: list[list[Ask]]) -> None:
    """Raise SystemExit if a stream is not what the source made, token for token."""
    wanted = {ask.seed: ask.max_tokens for slot in slots for ask in slot}
    assert wanted.keys() == {stream.seed for stream in streams}
    for stream in streams:
        if stream.error:
            raise SystemExit(f"stream {stream.seed}: {stream.error}")
        if stream.text != expected_bytes(stream.seed, wanted[stream.seed]):
            raise SystemExit(f"stream {stream.seed}: not the text that was made")


def measure(dialect: str, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one row on a gateway of its own. Raises SystemExit."""
    num_streams, rate = map(int, row.split("x"))
    slots = slots_of(num_streams, rate, args.seconds)
    num_clients = min(args.clients, num_streams)
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-paced-") as directory,
        ProcessPoolExecutor(num_clients, spawn) as pool,
    ):
        with serving(1 / rate, Path(directory), OUT / "gateway-streams.log") as gateway:
            warm = Slots(gateway.port, dialect, [[Ask(1 << 20, 8)]], 0, 60.0)
            pool.submit(receive, warm).result()
            begin_ns = time.time_ns() + round(_OPENING_S * _NS)
            timeout_s = 4 * args.seconds + 60
            running = [
                pool.submit(
                    receive,
                    Slots(gateway.port, dialect, slots[n::num_clients], begin_ns, timeout_s),
                )
                for n in range(num_clients)
            ]
            time.sleep(max(0.0, (begin_ns - time.time_ns()) / _NS) + 1.0)
            watched_ns = time.time_ns()
            watched = watch(gateway, args.seconds - 1.5)
            results = [each.result() for each in running]
        journal = read_journal(Path(directory, "journal"))
    streams = [stream for found, _ in results for stream in found]
    check(streams, slots)
    by_seed = {stream.seed: stream for stream in streams}
    received = {stream.seed: Handed(stream.times_ns, stream.counts) for stream in streams}
    found = figures([[by_seed[ask.seed] for ask in slot] for slot in slots], journal, received)
    found["tok_event"] = found.pop("tok_resp")
    num_tokens = _tokens_between(streams, watched_ns, watched["watched_s"])
    cpu_s = watched.pop("cpu_s")
    found |= watched | {
        "gateway_cores": round(cpu_s / watched["watched_s"], 3),
        "us_token": round(1e6 * cpu_s / num_tokens, 2),
        "client_cores": round(sum(cpu for _, cpu in results) / args.seconds, 3),
    }
    return {"dialect": dialect, "streams": num_streams, "rate": rate} | found


def _tokens_between(streams: list[Received], begin_ns: int, seconds: float) -> int:
    """Return how many tokens came within a time."""
    end_ns = begin_ns + seconds * _NS
    return sum(
        int(stream.counts[(stream.times_ns >= begin_ns) & (stream.times_ns < end_ns)].sum())
        for stream in streams
    )


def judge(runs: list[dict[str, Any]], cores: int) -> list[dict[str, Any]]:
    """Return the goals of a row beside the medians of its runs."""
    goals = []
    for figure, most in GOALS[has_many_cores(cores)].items():
        value = statistics.median(float(run[figure]) for run in runs)
        is_reached = value <= most
        goals.append({"figure": figure, "median": value, "goal": most, "is_reached": is_reached})
    return goals


def show(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = []
    for row in rows:
        name = f"{row['dialect']} {row['row']}"
        for run in row["runs"]:
            lines.append(f"{name}: " + ", ".join(f"{key} {run[key]}" for key in SHOWN))
        for goal in row["goals"]:
            reached = "reached" if goal["is_reached"] else "MISSED"
            lines.append(f"{reached:8} {name} {goal['figure']}: {goal['median']}, {goal['goal']}")
    return "\n".join(lines)


def main() -> int:
    """Command line; not 0 where something grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    cores = os.cpu_count() or 1
    parser.add_argument("--rows", nargs="+", default=[_ROW], metavar="STREAMSxRATE")
    parser.add_argument("--dialects", nargs="+", default=list(PATHS), choices=list(PATHS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run (%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of a row (%(default)s)")
    clients = max(1, min(8, cores // 4))
    parser.add_argument("--clients", type=int, default=clients, help="processes (%(default)s)")
    parser.add_argument("--name", help="keep the result in benchmarks/results/ under this name")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    found = []
    for dialect in args.dialects:
        for row in args.rows:
            runs = []
            for _ in range(args.repeat):
                runs.append(measure(dialect, row, args))
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            found.append(
                {"dialect": dialect, "row": row, "runs": runs, "goals": judge(runs, cores)}
            )
    about = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "cores": cores}
    about |= {"machine": platform.machine(), "seconds": args.seconds, "clients": args.clients}
    about["load_average"] = os.getloadavg()[0]
    result = about | {"rows": found}
    for path in [OUT / "gateway-streams", *([RESULTS / args.name] if args.name else [])]:
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(show(found))
    print(json.dumps(result))
    is_growing = any(
        run["is_growing"] or run["is_memory_growing"] for row in found for run in row["runs"]
    )
    return 1 if is_growing else 0


if __name__ == "__main__":
    sys.exit(main())
