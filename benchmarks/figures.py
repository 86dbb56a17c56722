"""Write the figures of README and docs from the newest results: `figures.py [--check]`.

Reads `step-<card>.json` of each card and `streams-h200.json` in `benchmarks/results/`. Writes a
table of eight rows between the README's two marks, every row between those of `docs/figures.md`,
what the rows owe their GPU between those of `docs/benchmarks.md`, and two plots of the H200 in
`docs/figures/`. With `--check` the exit code says whether all of it is up to date.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from accounts import accounts_table
from limits import GOALS_CARD, Rates, card
from report import NEWEST, RESULTS, number, percent
from rows import PARETO, ROWS, pareto_limit_ms
from slipstream_client.bench.plots import Axis, Line, plot

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "figures.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
STREAMS = RESULTS / "streams-h200.json"
PICTURES = ROOT / "docs" / "figures"
BEGIN, END = "<!-- figures: make figures -->", "<!-- end of figures -->"
COLORS = {"ours": "#1f6feb", "peer": "#8a8a8a"}
NAMES = {"ours": "Slipstream", "peer": "vLLM"}


PLOTS = """
![Share of the limit by batch size](figures/share-of-limit.svg)
![Tokens a second of the GPU against those of a user](figures/pareto.svg)"""

# What a newcomer compares first.
README_ROWS = (
    *("decode-bs1", "decode-bs32", "decode-bs256", "prefill", "mixed-512", "ttft", "start"),
    "fp8-decode-bs1",
)


def day(date: str) -> str:
    """Write `2026-11-26` as `26 November 2026`."""
    at = datetime.date.fromisoformat(date)
    return f"{at.day} {at:%B %Y}"


def date_of(commit: str) -> str:
    """Return when a commit was measured, by the name of its file in `benchmarks/results/`."""
    return min(RESULTS.glob(f"*-{commit}*.json")).name[:10]


def span(table: dict[str, Any]) -> str:
    """Return the days of all sittings of a table: one, or the first and the last."""
    days = [table["date"], *(date_of(r["commit"]) for r in table["rows"] if "commit" in r)]
    first, last = day(min(days)), day(max(days))
    return first if first == last else f"{first} to {last}"


def readme_table(table: dict[str, Any]) -> str:
    """Format `README_ROWS` as markdown: two figures and their ratio."""
    peer_name = table["peer"].get("versions", "no peer")
    lines = [
        f"Llama-3.1-8B shape, one {table['gpu']}, beside {peer_name}, measured {span(table)}:",
        "",
        "| workload | Slipstream | vLLM | ratio |",
        "|---|---|---|---|",
    ]
    for r in table["rows"]:
        if r["row"] in README_ROWS and r["ours"] is not None and r["ratio"] is not None:
            row, unit = ROWS[r["row"]], r["unit"]
            ours, peer = number(r["ours"], unit), number(r["peer"], unit)
            lines.append(f"| {row.label} | {ours} {unit} | {peer} | {r['ratio']:.2f} |")
    return "\n".join(lines)


def whole_table(table: dict[str, Any]) -> str:
    """The rows as markdown; what is to be reached only on the card for which it was set."""
    ours, limits = table["ours"], table["limits"]
    has_goals = card(table["gpu"]) == GOALS_CARD
    goal = " to reach |" * has_goals
    lines = [
        f"Llama-3.1-8B shape, random weights, one {table['gpu']}, commit {table['commit']} on "
        f"{day(table['date'])}, beside {table['peer'].get('versions', 'no peer')} in the same "
        f"sitting; medians of {ours.get('repetitions')}, at most "
        f"{ours.get('max_num_batched_tokens')} tokens a step. The limit is what must be read over "
        f"{limits['read_tb_s']} TB/s, or computed over "
        f"{limits['bf16_tflop_s']:.0f} TFLOP/s (fp8: {limits['fp8_tflop_s']:.0f}).",
        "",
        f"| workload | Slipstream | vLLM | ratio |{goal} share of the limit | spread |",
        "|---|---|---|---|---|---|" + "---|" * has_goals,
    ]
    for r in table["rows"]:
        if r["ours"] is None:
            continue  # not measured in this sitting
        row, unit = ROWS[r["row"]], r["unit"]
        ratio = "-" if r["ratio"] is None else f"{r['ratio']:.2f}"
        if r["reached"] and has_goals:
            ratio = f"**{ratio}**"
        cells = (
            f"{row.label} ({r['commit']}, {day(date_of(r['commit'])).rpartition(' ')[0]})"
            if "commit" in r
            else row.label,
            f"{number(r['ours'], unit)} {unit}",
            number(r["peer"], unit),
            ratio,
            *([f"{r['ratio_to_reach']:.2f}"] if has_goals else []),
            percent(r["share"]),
            percent(r["spread"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    legend = "A ratio above 1 means that ours is faster"
    legend += "; bold: the goal is reached." if has_goals else "."
    if any("commit" in r for r in table["rows"]):
        legend += " Rows with a commit of their own are of an earlier sitting."
    if (uncached := table["start_uncached"]) is not None:
        legend += f" Without compiled kernels the first start takes {number(uncached, 's')} s."
    return "\n".join([*lines, "", legend])


def streams_table(result: dict[str, Any]) -> str:
    """What the Triton side adds to tokens, as markdown."""
    lines = [
        "What Triton and our stages add to a token, from its making to its hand-over to the server "
        "for the client, with a source in the engine's place that owes every stream its tokens: "
        f"{result['cores']} cores, commit {result['commit']} on {day(result['date'])} "
        "(`make bench-streams`). Composed is the true ensemble of three models, fused one model "
        "that speaks the same tensors.",
        "",
        "| streams x tok/s | fused, median | p99 | composed, median | p99 |",
        "|---|---|---|---|---|",
    ]
    rows = {(r["wiring"], r["streams"], r["rate"]): r for r in result["rows"]}
    for wiring, streams, rate in rows:
        if wiring == "fused" and ("composed", streams, rate) in rows:
            pair = (rows[name, streams, rate] for name in ("fused", "composed"))
            cells = [f"{r[name]:.3g} ms" for r in pair for name in ("p50_ms", "p99_ms")]
            lines.append(f"| {' | '.join([f'{streams} x {rate}', *cells])} |")
    alone = [
        f"{r['added_p50_ms']:.2g} ms {r['wiring']}" for r in rows.values() if r["streams"] == 1
    ]
    if alone:
        lines += [
            "",
            f"Before its first token a stream alone waits {' and '.join(alone)} for them.",
        ]
    return "\n".join(lines)


def _points(table: dict[str, Any], side: str) -> list[tuple[int, float]]:
    """(batch, ms a token), by batch."""
    return sorted((int(batch), itl) for batch, itl in table["pareto"][side].items())


def share_plot(table: dict[str, Any]) -> str:
    """How much of the limit a decode step reaches."""
    rates = Rates(
        *(1e12 * table["limits"][f"{of}_s"] for of in ("read_tb", "bf16_tflop", "fp8_tflop"))
    )
    lines = []
    for side in ("peer", "ours"):
        points = [(b, pareto_limit_ms(b, rates) / itl) for b, itl in _points(table, side)]
        lines.append(Line(NAMES[side], COLORS[side], points))
    return plot(
        "Share of the limit in a decode step, bf16",
        Axis("batch size", 1, 256, PARETO, lambda v: f"{v:.0f}", is_log=True),
        Axis("share of the limit", 0, 1, [i / 5 for i in range(6)], lambda v: f"{v:.0%}"),
        lines,
    )


def pareto_plot(table: dict[str, Any]) -> str:
    """Throughput against latency; a point is a batch size."""
    lines, users = [], [1.0]
    for side in ("peer", "ours"):
        points = [(1e3 / itl, 1e3 * b / itl) for b, itl in _points(table, side)]
        users += [user for user, _ in points]
        labels = [str(batch) for batch, _ in _points(table, side)]
        lines.append(Line(NAMES[side], COLORS[side], points, labels))
    most = 50 * (int(max(users) / 50) + 1)
    gpu_ticks = [10**i * k for i in (2, 3, 4) for k in (1, 2, 5)]
    return plot(
        "Tokens a second, bf16, by batch size",
        Axis("of one user", 0, most, range(0, most + 1, 50), lambda v: f"{v:.0f}"),
        Axis("of the GPU", 100, 50_000, gpu_ticks, lambda v: f"{v:,.0f}", is_log=True),
        lines,
    )


def between_marks(path: Path, text: str) -> str:
    """The file, with this text between its marks."""
    head, mark, rest = path.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{path}: the marks {BEGIN} and {END} are not both there")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def files(tables: dict[str, dict[str, Any]], streams: dict[str, Any]) -> dict[Path, str]:
    """Everything that is made of the results; `tables` by card."""
    plotted = tables[GOALS_CARD]
    parts = [whole_table(plotted) + "\n" + PLOTS]
    parts += [whole_table(table) for name, table in tables.items() if name != GOALS_CARD]
    text = "\n\n".join([*parts, streams_table(streams)])
    return {
        README: between_marks(README, readme_table(plotted)),
        FIGURES: between_marks(FIGURES, text),
        BENCHMARKS: between_marks(BENCHMARKS, accounts_table(plotted)),
        PICTURES / "share-of-limit.svg": share_plot(plotted),
        PICTURES / "pareto.svg": pareto_plot(plotted),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not NEWEST[GOALS_CARD].is_file():
        raise SystemExit(
            f"{NEWEST[GOALS_CARD]}: no such file; "
            f"make bench-gpu writes it on a machine with an {GOALS_CARD}"
        )
    tables = {name: json.loads(path.read_text()) for name, path in NEWEST.items() if path.is_file()}
    texts = files(tables, json.loads(STREAMS.read_text()))
    if args.check:
        return int(any(not p.is_file() or p.read_text() != text for p, text in texts.items()))
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
