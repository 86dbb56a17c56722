"""`slipstream bench`, perf_analyzer and locust on one server at one load: do they say the same?

So many gRPC streams at a time, each beginning when the one before it has ended, on the same prompts
and of the same length. The three take turns, so that a slow minute of the machine is everybody's;
compared are the medians of the rounds. Not 0 where a tool differs by more than the tolerance.

    python load/run_agreement.py                 the default model
    python load/run_agreement.py --step-ms 20    in its place a source that computes nothing
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import run_locust
import run_perf
from serving import PROMPTS, REPORTS, add_arguments, commit, serving
from slipstream_serve.server import repository_root

RESULTS = repository_root() / "benchmarks" / "results"
TOOLS = ("bench", "perf_analyzer", "locust")
FIGURES = {
    "requests_per_s": "requests/s",
    "responses_per_s": "responses/s",
    "ttft_ms": "first response, mean ms",
    "request_ms": "whole request, mean ms",
}
Figures = dict[str, float]


def by_bench(args: argparse.Namespace, grpc: str, folder: Path) -> Figures:
    """One run of `slipstream bench`. Raises SystemExit where a request failed."""
    prompts, report = folder / "prompts.jsonl", folder / "bench.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    host, _, port = grpc.rpartition(":")
    command = [
        *(sys.executable, "-m", "slipstream_client.cli", "bench", "--host", host),
        *("--grpc-port", port, "--model", args.model, "--concurrency", str(args.users)),
        *(
            "--requests",
            str(args.requests),
            "--warm-up",
            str(args.users),
            "--output-len",
            str(args.max_tokens),
        ),
        *("--prompts", str(prompts), "--json", str(report)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench: {done.stderr.strip()}")
    [load] = json.loads(report.read_text())["loads"]
    print(f"bench's clients: {json.dumps(load['clients'])}", file=sys.stderr)
    return {
        "requests_per_s": load["requests_per_s"],
        "responses_per_s": load["responses_per_s"],
        "ttft_ms": load["ttft_ms"]["mean"],
        "request_ms": load["e2e_ms"]["mean"],
    }


def by_perf_analyzer(args: argparse.Namespace, grpc: str, folder: Path) -> Figures:
    """One run of perf_analyzer. Raises SystemExit where it fails."""
    row = run_perf.measure(args, grpc, args.users, folder)
    return {
        "requests_per_s": row["requests_per_s"],
        "responses_per_s": row["responses_per_s"],
        "ttft_ms": row["ttft_mean_ms"],
        "request_ms": row["request_mean_ms"],
    }


def by_locust(args: argparse.Namespace, http: str, grpc: str) -> Figures:
    """One run of locust, gRPC users alone. Raises SystemExit where a request failed."""
    os.environ["TOGETHER"] = str(args.users)
    stats, code = run_locust.measure(args, http, grpc, ("GrpcUser",))
    if code:
        raise SystemExit(f"locust ended with code {code}; see {REPORTS / 'locust.log'}")
    return of_locust(stats)


def of_locust(stats: list[dict[str, Any]]) -> Figures:
    """Return locust's figures over the time from its first user to its last answer."""
    named = {entry["name"]: entry for entry in stats}
    request, first = named["request"], named["ttft"]
    seconds = request["last_request_timestamp"] - named["connect"]["start_time"]
    return {
        "requests_per_s": request["num_requests"] / seconds,
        "ttft_ms": first["total_response_time"] / first["num_requests"],
        "request_ms": request["total_response_time"] / request["num_requests"],
    }


def compared(rounds: list[dict[str, Figures]], tolerance: float) -> dict[str, Any]:
    """Medians of each tool, and how far each is from bench's, where both have a figure."""
    medians: dict[str, Figures] = {
        tool: {
            name: round(statistics.median(each[tool][name] for each in rounds), 3)
            for name in rounds[0][tool]
        }
        for tool in rounds[0]
    }
    own = medians["bench"]
    differences = {
        tool: {name: round(value / own[name] - 1, 4) for name, value in medians[tool].items()}
        for tool in medians
        if tool != "bench"
    }
    worst = max(abs(value) for each in differences.values() for value in each.values())
    return {
        "medians": medians,
        "differences": differences,
        "worst": worst,
        "do_agree": worst <= tolerance,
    }


def table(found: dict[str, Any]) -> str:
    """The three side by side, as Markdown."""
    tools = [tool for tool in TOOLS if tool in found["medians"]]
    lines = [f"| | {' | '.join(tools)} |", "|" + "---|" * (1 + len(tools))]
    for name, title in FIGURES.items():
        cells = []
        for tool in tools:
            value = found["medians"][tool].get(name)
            difference = found["differences"].get(tool, {}).get(name)
            said = "" if difference is None else f" ({difference:+.1%})"
            cells.append("-" if value is None else f"{value:.4g}{said}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


@contextlib.contextmanager
def paced(step_ms: float) -> Iterator[None]:
    """Servers started inside have a source with that step for their engine; 0: the engine."""
    if not step_ms:
        yield
        return
    sys.path.append(str(repository_root() / "benchmarks"))
    from paced_engine import write_python

    with tempfile.TemporaryDirectory(prefix="slipstream-paced-") as name:
        python = Path(name, "python")
        write_python(python, step_ms / 1e3, Path(name, "journal"))
        os.environ["SLIPSTREAM_PYTHON"] = str(python)
        try:
            yield
        finally:
            del os.environ["SLIPSTREAM_PYTHON"]


def measure(args: argparse.Namespace) -> list[dict[str, Figures]]:
    """All rounds, on one server."""
    rounds = []
    with paced(args.step_ms), tempfile.TemporaryDirectory() as name, serving(args) as (http, grpc):
        folder = Path(name)
        args.requests = args.warm_up
        by_bench(args, grpc, folder)
        for number in range(args.rounds):
            found = {}
            args.requests = args.users * args.each
            if "locust" in args.tools:
                found["locust"] = by_locust(args, http, grpc)
                # As many requests as it made in its time, the same number for each user.
                each = found["locust"]["requests_per_s"] * args.seconds / args.users
                args.requests = args.users * max(1, round(each))
            found["bench"] = by_bench(args, grpc, folder)
            if "perf_analyzer" in args.tools:
                found["perf_analyzer"] = by_perf_analyzer(args, grpc, folder)
            rounds.append(found)
            print(f"round {number + 1}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return rounds


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add_arguments(parser)
    parser.add_argument("--users", type=int, default=4, help="streams at a time (%(default)s)")
    parser.add_argument("--seconds", type=int, default=15, help="of locust (%(default)s)")
    parser.add_argument("--each", type=int, default=10, help="requests a user, without locust (10)")
    parser.add_argument("--tools", nargs="+", default=TOOLS[1:], choices=TOOLS[1:])
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--warm-up", type=int, default=16, help="requests (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="a paced source's; 0: none")
    parser.add_argument("--tolerance", type=float, default=0.05, help="(%(default)s)")
    parser.add_argument("--name", help="keep the result in benchmarks/results/ under this name")
    args = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    rounds = measure(args)
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "source": f"paced, {args.step_ms:g} ms a step" if args.step_ms else "engine",
        **{name: getattr(args, name) for name in ("model", "users", "seconds", "max_tokens")},
    }
    result = about | compared(rounds, args.tolerance) | {"rounds": rounds}
    for path in [REPORTS / "agreement", *([RESULTS / args.name] if args.name else [])]:
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0 if result["do_agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
