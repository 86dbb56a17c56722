"""Two sides of one sitting as one table: medians, spread, ratio, share of the limit."""

import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from limits import CARDS, Rates, rates_of
from rows import ROWS, Row

RESULTS = Path(__file__).resolve().parent / "results"
# Of each card the newest table.
NEWEST = {card: RESULTS / f"step-{card.lower()}.json" for card in CARDS}


def commit() -> str:
    """The commit that was measured, where the checkout knows it."""
    if known := os.environ.get("SLIPSTREAM_COMMIT"):
        return known
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def _median(figures: list[float] | None) -> float | None:
    return statistics.median(figures) if figures else None


def spread(figures: list[float] | None) -> float | None:
    """(largest - smallest) / median of the repetitions."""
    if not figures:
        return None
    return round((max(figures) - min(figures)) / statistics.median(figures), 4)


def share(row: Row, figure: float | None, limit: float | None) -> float | None:
    """How much of the limit is reached, up to 1."""
    if figure is None or limit is None:
        return None
    return round(figure / limit if row.is_rate else limit / figure, 4)


def line(
    row: Row, ours: list[float] | None, peer: list[float] | None, rates: Rates
) -> dict[str, Any]:
    """A row of the table; null where nothing was measured."""
    mine, theirs, limit = _median(ours), _median(peer), row.limit(rates)
    ratio = None if mine is None or theirs is None else round(row.ratio(mine, theirs), 4)
    is_reached: bool | None = None
    if ratio is not None and row.figure != "start":
        is_reached = ratio >= row.ratio_to_reach
    elif mine is not None:
        is_reached = mine >= row.goal if row.is_rate else mine <= row.goal
    return {
        "row": row.name,
        "unit": row.unit,
        "ours": mine,
        "peer": theirs,
        "limit": None if limit is None else round(limit, 4),
        "spread": spread(ours),
        "peer_spread": spread(peer),
        "share": share(row, mine, limit),
        "goal": row.goal,
        "ratio": ratio,
        "ratio_to_reach": round(row.ratio_to_reach, 4),
        "reached": is_reached,
        "ours_runs": ours or [],
        "peer_runs": peer or [],
    }


def merge(ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> dict[str, Any]:
    """The whole table of what both sides hold; either may be missing."""
    empty: dict[str, Any] = {"about": {}, "rows": {}, "pareto": {}}
    mine, theirs = ours or empty, peer or empty
    about = dict(mine["about"])
    gpu, ceilings = about.pop("gpu", None), about.pop("ceilings", {})
    rates = rates_of(gpu, ceilings)
    return {
        "commit": commit() if mine.get("commit", "unknown") == "unknown" else mine["commit"],
        "date": mine.get("date") or theirs.get("date"),
        "gpu": gpu,
        "ceilings": ceilings,
        "limits": {
            "read_tb_s": rates.read / 1e12,
            "bf16_tflop_s": rates.bf16 / 1e12,
            "fp8_tflop_s": rates.fp8 / 1e12,
        },
        "ours": about,
        "peer": theirs["about"],
        "start_uncached": _median(mine.get("start_uncached")),
        "rows": [
            line(r, mine["rows"].get(r.name), theirs["rows"].get(r.name), rates)
            for r in ROWS.values()
        ],
        "pareto": {"ours": mine["pareto"], "peer": theirs["pareto"]},
    }


def keep(table: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """`table`, with those rows of `old` that it did not measure beside a peer; they say their
    commit.
    """
    before = {row["row"]: row for row in old["rows"]}
    rows = []
    for row in table["rows"]:
        kept = before.get(row["row"])
        if row["ratio"] is None and kept is not None and kept["ours"] is not None:
            row = {"commit": old["commit"]} | kept
        rows.append(row)
    pareto = table["pareto"] if table["pareto"]["ours"] else old["pareto"]
    uncached = table["start_uncached"]
    uncached = old["start_uncached"] if uncached is None else uncached
    return table | {"rows": rows, "pareto": pareto, "start_uncached": uncached}


def number(value: float | None, unit: str) -> str:
    """A figure as people read it."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if unit == "tok/s" else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value:.1%}"


def show(table: dict[str, Any]) -> str:
    """The table for a terminal."""
    head = (
        "row",
        "unit",
        "ours",
        "peer",
        "ratio",
        "wanted",
        "goal",
        "limit",
        "share",
        "spread",
        "",
    )
    lines = [head]
    for r in table["rows"]:
        unit = r["unit"]
        verdict = {True: "reached", False: "not reached", None: "not measured"}[r["reached"]]
        lines.append(
            (
                r["row"],
                unit,
                number(r["ours"], unit),
                number(r["peer"], unit),
                "-" if r["ratio"] is None else f"{r['ratio']:.3f}",
                f"{r['ratio_to_reach']:.3f}",
                number(r["goal"], unit),
                number(r["limit"], unit),
                percent(r["share"]),
                percent(r["spread"]),
                verdict,
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    texts = []
    for cells in lines:
        left = cells[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        texts.append("  ".join([left, *rest]).rstrip())
    facts = ", ".join(f"{name} {value}" for name, value in table["ceilings"].items())
    uncached = table["start_uncached"]
    end = f"start without compiled kernels: {number(uncached, 's')} s"
    return "\n".join([f"{table['gpu']}, commit {table['commit']}; measured {facts}", *texts, end])
