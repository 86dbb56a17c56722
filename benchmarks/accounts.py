"""What the rows of a table owe their GPU: `python benchmarks/accounts.py [TABLE]`.

A limit (limits.py) is of the highest rates that were ever measured, and where much is read and much
computed it lets both happen at once. Here both stand side by side, at the rates that the machine
had in the row's own sitting (`ceilings`, under its power cap), beside what we take.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from limits import GOALS_CARD, measured_rates
from report import NEWEST, RESULTS
from rows import ROWS, Row

COLUMNS = ("weights read", "computed", "cache read", "Slipstream", "to reach")


def ceilings_of(table: dict[str, Any], line: dict[str, Any]) -> dict[str, float]:
    """Return the ceilings of a row's sitting, maybe an earlier one; empty if none are kept."""
    if "commit" not in line:
        return dict(table["ceilings"])
    for path in sorted(RESULTS.glob(f"*-{line['commit']}*.json")):
        earlier = json.loads(path.read_text())
        if earlier.get("gpu") == table["gpu"] and earlier.get("ceilings"):
            return dict(earlier["ceilings"])
    return {}


def account(row: Row, ours: float, peer: float, ceilings: dict[str, float]) -> list[float]:
    """Seconds, by `COLUMNS`."""
    work = row.work(measured_rates(ceilings))
    assert work is not None, row.name
    layers, head, attention = work
    return [
        layers.read_seconds + head.read_seconds,
        layers.matrix_seconds + head.matrix_seconds + attention.matrix_seconds,
        attention.read_seconds,
        row.seconds(ours),
        row.seconds(peer) / row.ratio_to_reach,
    ]


def accounts_table(table: dict[str, Any]) -> str:
    """Format as markdown the rows that were measured beside a peer on a machine of known rates."""
    lines = [f"| workload | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for line in table["rows"]:
        row = ROWS[line["row"]]
        ceilings = ceilings_of(table, line)
        if row.make is None or line["ratio"] is None or not ceilings:
            continue
        seconds = account(row, line["ours"], line["peer"], ceilings)
        unit, factor = ("s", 1.0) if row.is_rate else ("ms", 1e3)
        cells = [f"{factor * value:.2f} {unit}" for value in seconds]
        lines.append(f"| {' | '.join([row.label, *cells])} |")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    newest = NEWEST[GOALS_CARD]
    parser.add_argument("table", nargs="?", type=Path, default=newest, help="of make bench-gpu")
    print(accounts_table(json.loads(parser.parse_args().table.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
