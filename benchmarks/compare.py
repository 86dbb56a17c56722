"""Compare two trees of this repository on one GPU: `python benchmarks/compare.py OLD NEW`.

Runs the rows of `step.py ours` in both trees in turns (old, new, new, old, ...), so that a drift of
the machine meets both. A row's figure is the better of a tree's tries, a try's the median of its
repetitions. Prints a table and one JSON line; exit code 1 if a row of the new tree is more than
`--tolerance` slower. A tree may lie anywhere; `git archive COMMIT | tar x -C DIR` makes one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import ROWS

PACKAGES = ("backend", "ensemble", "preprocessing", "postprocessing", "client")


def run(tree: Path, rows: list[str], repeat: int) -> dict[str, float]:
    """Measure rows in one tree; the median of each. Empty for what failed."""
    paths = [str(tree / package) for package in PACKAGES]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        out = Path(folder) / "ours.json"
        command = [sys.executable, "benchmarks/step.py", "ours", str(out)]
        subprocess.run(
            [*command, "--repeat", str(repeat), "--rows", *rows],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            check=False,
        )
        found = json.loads(out.read_text())["rows"] if out.is_file() else {}
    return {name: statistics.median(figures) for name, figures in found.items()}


def ratios(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict[str, list[float]]:
    """Row to `[old, new, ratio]`; the ratio is above 1 where the new tree is faster."""
    table = {}
    for name in ROWS:
        sides = [[tried[name] for tried in tries if name in tried] for tries in (old, new)]
        if all(sides):
            row = ROWS[name]
            best = max if row.is_rate else min
            before, after = best(sides[0]), best(sides[1])
            table[name] = [before, after, row.ratio(after, before)]
    return table


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--tries", type=int, default=2, help="of each tree")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of a row in a try")
    parser.add_argument("--tolerance", type=float, default=0.01)
    args = parser.parse_args()
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(args.tries):
        for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
            print(f"== {name}, try {number + 1}", flush=True)
            found[name].append(run(trees[name], args.rows, args.repeat))
    table = ratios(found["old"], found["new"])
    slower = [name for name, (_, _, ratio) in table.items() if ratio < 1 - args.tolerance]
    print(f"{'row':20} {'old':>12} {'new':>12} {'ratio':>8}")
    for name, (before, after, ratio) in table.items():
        mark = "  slower" if name in slower else ""
        print(f"{name:20} {before:12,.3f} {after:12,.3f} {ratio:8.4f}{mark}")
    missing = sorted(set(args.rows) - set(table))
    print(json.dumps({"rows": table, "missing": missing, "tries": found}))
    return 1 if slower or missing else 0


if __name__ == "__main__":
    sys.exit(main())
