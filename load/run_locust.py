"""Runs locust on a server and writes its reports: locust.html and locust_stats.csv."""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

from serving import REPORTS, add_arguments, serving

COLUMNS = {
    "Type": 6,
    "Name": 10,
    "Request Count": 10,
    "Failure Count": 10,
    "Requests/s": 12,
    "50%": 8,
    "90%": 8,
    "99%": 8,
}
"""Columns of locust's table that the summary shows, with their widths; times in ms."""


def summary(stats: Path) -> str:
    """locust_stats.csv as a table."""
    with stats.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = ["".join(f"{name:>{width + 5}}" for name, width in COLUMNS.items())]
    for row in rows:
        cells = (row[name] for name in COLUMNS)
        short = (f"{float(cell):.1f}" if "." in cell else cell for cell in cells)
        widths = COLUMNS.values()
        lines.append("".join(f"{c:>{w + 5}}" for c, w in zip(short, widths, strict=True)))
    return "\n".join(lines)


def main() -> int:
    """locust's exit code: not 0 where a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add_arguments(parser)
    parser.add_argument("--users", type=int, default=8, help="half gRPC, half HTTP (%(default)s)")
    parser.add_argument("--seconds", type=int, default=20, help="(%(default)s)")
    args = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    with serving(args) as (http, grpc):
        variables = {"GRPC": grpc, "MODEL": args.model, "MAX_TOKENS": str(args.max_tokens)}
        command = [
            *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))),
            *("--headless", "--only-summary", "--host", f"http://{http}"),
            *("-u", str(args.users), "-r", str(args.users), "-t", f"{args.seconds}s"),
            *("--stop-timeout", "30", "--loglevel", "WARNING"),
            *("--csv", str(REPORTS / "locust"), "--html", str(REPORTS / "locust.html")),
        ]
        environment = os.environ | variables
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    print(summary(REPORTS / "locust_stats.csv"))
    print(f"report: {REPORTS / 'locust.html'}", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
