"""Runs locust on a server and writes its report: locust.html, and the figures as locust.json."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving import REPORTS, add_arguments, serving

PERCENTILES = (50, 90, 99)


def rows_of(stats: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Locust's final statistics, an entry a kind of event; times in ms."""
    return [
        {
            "type": entry["method"],
            "event": entry["name"],
            "count": entry["num_requests"],
            "failures": entry["num_failures"],
            "per_s": round(entry["num_requests"] / seconds, 2),
            "mean_ms": round(entry["total_response_time"] / max(1, entry["num_requests"]), 3),
            **percentiles({float(ms): count for ms, count in entry["response_times"].items()}),
        }
        for entry in sorted(stats, key=lambda entry: (entry["method"], entry["name"]))
    ]


def percentiles(counts: dict[float, int]) -> dict[str, float]:
    """Percentiles of a histogram value -> count; empty for no values."""
    total, result = sum(counts.values()), {}
    for percent in PERCENTILES if total else ():
        seen = 0
        for value in sorted(counts):
            seen += counts[value]
            if seen * 100 >= total * percent:
                result[f"p{percent}_ms"] = value
                break
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in columns."""
    names = list(max(rows, key=len))
    lines = ["".join(f"{name:>10}" for name in names)]
    lines += ["".join(f"{row.get(name, '')!s:>10}" for name in names) for row in rows]
    return "\n".join(lines)


def measure(
    args: argparse.Namespace, http: str, grpc: str, users: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], int]:
    """Locust's statistics, and its exit code: not 0 where a request failed.

    `users` are classes of the locustfile, all if none is named. Raises SystemExit without requests.
    """
    log = REPORTS / "locust.log"
    variables = {"GRPC": grpc, "MODEL": args.model, "MAX_TOKENS": str(args.max_tokens)}
    variables |= {"LOAD": args.load, "FIELDS": args.fields}
    command = [
        *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))),
        *("--headless", "--json", "--host", f"http://{http}"),
        *("-u", str(args.users), "-r", str(args.users), "-t", f"{args.seconds}s"),
        *("--stop-timeout", "30", "--html", str(REPORTS / "locust.html")),
        *users,
    ]
    with log.open("w") as errors:
        done = subprocess.run(
            command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=errors, check=False
        )
    stats = json.loads(done.stdout or "[]")
    if not stats:
        raise SystemExit(f"locust: no request was made; see {log}")
    return stats, done.returncode


def main() -> int:
    """locust's exit code: not 0 where a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add_arguments(parser)
    parser.add_argument("--users", type=int, default=8, help="half gRPC, half HTTP (%(default)s)")
    parser.add_argument("--seconds", type=int, default=20, help="(%(default)s)")
    args = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    with serving(args) as (http, grpc):
        stats, code = measure(args, http, grpc)
    rows = rows_of(stats, args.seconds)
    about = {"model": args.model, "users": args.users, "max_tokens": args.max_tokens}
    (REPORTS / "locust.json").write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
    print(table(rows))
    print(f"report: {REPORTS / 'locust.html'}", file=sys.stderr)
    print(json.dumps(about | {"rows": rows}))
    return code


if __name__ == "__main__":
    sys.exit(main())
