"""What the rows of a table owe their GPU: `python benchmarks/accounts.py [TABLE]`.

A limit (limits.py) is of the highest rates that were ever measured, and where much is read and much
computed it lets both happen at once. Here both stand side by side, at the rates that the machine
had in the row's own sitting (`ceilings`, under its power cap), beside what we take.
"""

import json
import sys
from pathlib import Path
from typing import Any

from limits import CARDS, GOALS_CARD, Rates
from report import NEWEST, RESULTS
from rows import ROWS, Row

COLUMNS = ("weights read", "products computed", "cache read", "Slipstream", "to reach")


def rates_at(ceilings: dict[str, float]) -> Rates:
    """As measured; e4m3 is as much faster than bf16 as at its best."""
    best, bf16 = CARDS[GOALS_CARD], ceilings["bf16_tflop_s"] * 1e12
    return Rates(ceilings["read_tb_s"] * 1e12, bf16, bf16 * best.fp8 / best.bf16)


def sitting(table: dict[str, Any], commit: str) -> dict[str, Any]:
    """In which a row of `table` was measured, of an earlier commit."""
    named = sorted(RESULTS.glob(f"*-{commit}*.json"))
    tables = (json.loads(path.read_text()) for path in named)
    return next((t for t in tables if t.get("ceilings") and t.get("gpu") == table["gpu"]), table)


def account(row: Row, ours: float, peer: float, ceilings: dict[str, float]) -> list[float]:
    """Seconds, by `COLUMNS`."""
    work = row.work(rates_at(ceilings))
    assert work is not None, row.name
    layers, head, attention = work
    return [
        layers.read_seconds + head.read_seconds,
        layers.matrix_seconds + head.matrix_seconds + attention.matrix_seconds,
        attention.read_seconds,
        row.seconds(ours),
        row.seconds(peer * row.ratio_to_reach if row.is_rate else peer / row.ratio_to_reach),
    ]


def accounts_table(table: dict[str, Any]) -> str:
    """As markdown, of the rows that were measured beside a peer."""
    lines = [f"| workload | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for line in table["rows"]:
        row = ROWS[line["row"]]
        if row.make is None or line["ours"] is None or line["peer"] is None:
            continue
        measured = sitting(table, line["commit"]) if "commit" in line else table
        if not measured["ceilings"]:
            continue
        seconds = account(row, line["ours"], line["peer"], measured["ceilings"])
        unit, factor = ("s", 1.0) if row.is_rate else ("ms", 1e3)
        cells = [f"{factor * value:.2f} {unit}" for value in seconds]
        lines.append(f"| {' | '.join([row.label, *cells])} |")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NEWEST[GOALS_CARD]
    print(accounts_table(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
