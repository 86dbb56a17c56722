"""The report as one HTML file: no scripts, nothing loaded from the network, light and dark."""

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from slipstream_client.bench.figures import QUANTILES
from slipstream_client.bench.plots import Axis, Line, axis_of, fit_axis, plot

_COLORS = ("#1f77b4", "#d9730d", "#2ca02c", "#d62728", "#9467bd", "#8c6d31", "#17a2b8", "#c2569d")
_MAX_CURVES = 6
_LEAST_MS = 1e-3
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #24292f; --grid: #e4e4e4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15191e; --ink: #d5dbe3; --grid: #333a43; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
       max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
        overflow-x: auto; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--grid);
         white-space: nowrap; }
code { overflow-wrap: anywhere; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } svg { max-width: 100%; height: auto; }
.ink { fill: var(--ink); } .grid { stroke: var(--grid); } .paper { fill: var(--paper); }
.warning { border-left: .3rem solid #d9730d; padding-left: .7rem; }
"""


def columns(point: dict[str, Any]) -> dict[str, str]:
    """Return a load's main figures: heading -> cell. Page and terminal show this table."""

    def ms(name: str) -> str:
        found = point[f"{name}_ms"]
        return "/".join(f"{found[p]:.4g}" for p in ("p50", "p95", "p99")) if found else "-"

    cells = {
        "load": point["load"],
        "requests": str(point["requests"]),
        "refused": str(point["refused"]),
        "failed": str(point["failed"]),
        "req/s": f"{point['requests_per_s']:.4g}",
        "tok/s": f"{point['tokens_per_s']:.5g}",
        "tok/s/user": f"{point['tokens_per_s_per_user']:.4g}",
        "ttft ms p50/p95/p99": ms("ttft"),
        "itl ms": ms("itl"),
        "e2e ms": ms("e2e"),
    }
    if "goodput" in point:
        good = point["goodput"]
        cells["goodput"] = f"{good['requests_per_s']:.4g}/s ({good['share']:.0%})"
    if "per_request" in point.get("cost", {}):
        cells["cost/req"] = f"{point['cost']['per_request']:.3g}"
    return cells


def page(report: dict[str, Any]) -> str:
    """Return the whole HTML file."""
    points = report["loads"]
    pictures = [*_over_load(points), *_pareto(points), *_distributions(points)]
    limits = [f"{p['load']}: {p['clients']['limit']}" for p in points if p["clients"]["limit"]]
    target = report["target"]
    title = f"slipstream bench: {target['model']} over {target['protocol']}"
    facts = {
        "begun": report["begun"],
        "server": target["address"],
        "version": f"{report['version']} {report['commit'] or ''}",
        "machine of the clients": ", ".join(f"{v}" for v in report["machine"].values()),
        "command": shlex.join(report["command"]),
    }
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td style='text-align:left'><code>{escape(str(value))}</code>"
        "</td></tr>"
        for name, value in facts.items()
    )
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in limits)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n<table>{rows}</table>\n{warnings}"
        f"<h2>Loads</h2>\n{_table(points)}\n<h2>Plots</h2>\n"
        f'<div class="plots">\n{"".join(pictures)}</div>\n</body></html>\n'
    )


def _table(points: Sequence[dict[str, Any]]) -> str:
    rows = [columns(point) for point in points]
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>\n"
        for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _over_load(points: Sequence[dict[str, Any]]) -> list[str]:
    """Plot latency over load; nothing for a single load."""
    if len({point["load"] for point in points}) < 2:
        return []
    title = "requests a second offered" if "rate" in points[0] else "requests at a time"
    xs = [float(point.get("rate") or point["concurrency"]) for point in points]
    x_axis = axis_of(title, xs)
    pictures = []
    names = {"ttft": "Time to the first token", "itl": "Time per token", "e2e": "Whole request"}
    for name, what in names.items():
        lines = []
        for color, percent in zip(_COLORS, ("p50", "p95", "p99"), strict=False):
            pairs = zip(xs, points, strict=True)
            found = [(x, point[f"{name}_ms"]) for x, point in pairs]
            place = [(x, ms[percent]) for x, ms in found if ms]
            lines.append(Line(percent, color, place))
        values = [y for line in lines for _, y in line.points]
        if values:
            y_axis = fit_axis("ms", values)
            pictures.append(plot(f"{what} over load", x_axis, y_axis, lines, has_legend=True))
    return pictures


def _pareto(points: Sequence[dict[str, Any]]) -> list[str]:
    """Plot throughput of all users over the speed of one user."""
    found = [(p["tokens_per_s_per_user"], p["tokens_per_s"], p["load"]) for p in points]
    found = [entry for entry in found if entry[0] and entry[1]]
    if len(found) < 2:
        return []
    best = frontier([(x, y) for x, y, _ in found])
    labels = [label for _, _, label in found]
    places = [(x, y) for x, y, _ in found]
    return [
        plot(
            "Tokens a second: of all users over those of one",
            fit_axis("of one user (median)", [x for x, _ in places]),
            fit_axis("of all", [y for _, y in places]),
            [
                Line("", _COLORS[0], best, has_dots=False),
                Line("", _COLORS[0], places, labels, is_joined=False),
            ],
        )
    ]


def frontier(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto frontier, sorted by x: the points that no other point dominates."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(places), reverse=True):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best[::-1]


def _distributions(points: Sequence[dict[str, Any]]) -> list[str]:
    """Plot the share of tokens or requests that took at most a given time."""
    chosen = [points[i] for i in _spread(len(points))]
    share = Axis("share", 0, 1, [i / 5 for i in range(6)], lambda value: f"{value:.0%}")
    pictures = []
    for name, what in (("ttft", "Time to the first token"), ("itl", "Time per token")):
        lines = []
        for color, point in zip(_COLORS, chosen, strict=False):
            quantiles = point["quantiles_ms"].get(name, [])
            pairs = zip(quantiles, QUANTILES / 100, strict=bool(quantiles))
            curve = [(max(_LEAST_MS, ms), float(part)) for ms, part in pairs]
            lines.append(Line(point["load"], color, curve, has_dots=False))
        values = [ms for line in lines for ms, _ in line.points]
        if values:
            x_axis = fit_axis("ms", values, is_log=True)
            pictures.append(plot(f"{what}: distribution", x_axis, share, lines, has_legend=True))
    return pictures


def _spread(count: int) -> list[int]:
    """Return at most `_MAX_CURVES` indices below `count`, with the first and the last."""
    picked = np.linspace(0, count - 1, min(count, _MAX_CURVES))
    return sorted({round(float(i)) for i in picked})
