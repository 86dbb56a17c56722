"""Writes the README's figures from the raw results: `python benchmarks/table.py [--check]`.

A folder of `benchmarks/results/` is one sitting on one machine: `engine.jsonl` is ours (by
`engine.py`), `vllm.jsonl` the peer's on the same workloads, one JSON object a line, and
`about.json` names commit, machine and versions. The newest folder that has all three is taken.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: python benchmarks/table.py -->", "<!-- end of figures -->"

# workload -> (what the row says, our figure, the peer's bench name and batch, its figure, unit)
ROWS = {
    "decode_1": ("decode, batch 1", "itl_median_ms", ("b_decode", 1), "itl_median_ms", "ms"),
    "decode_32": ("decode, batch 32", "itl_median_ms", ("c_decode", 32), "itl_median_ms", "ms"),
    "decode_128": ("decode, batch 128", "itl_median_ms", ("c_decode", 128), "itl_median_ms", "ms"),
    "decode_256": (
        "decode, batch 256",
        "itl_median_ms",
        ("x_decode_256", 256),
        "itl_median_ms",
        "ms",
    ),
    "prefill": ("16 prompts of 2,048", "input_tok_s", ("d_prefill", None), "in_tok_s", "tok/s"),
    "mixed": (
        "512 requests, 128-1,024 in, 256 out",
        "output_tok_s",
        ("a_offline", None),
        "out_tok_s",
        "tok/s",
    ),
}


def read(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def newest() -> Path:
    """The last sitting with both engines."""
    names = ("about.json", "engine.jsonl", "vllm.jsonl")
    folders = [f for f in RESULTS.glob("*") if all((f / name).is_file() for name in names)]
    if not folders:
        raise SystemExit(f"no folder of {RESULTS} has {', '.join(names)}")
    return max(folders, key=lambda folder: folder.name)


def peer_figure(rows: list[dict[str, Any]], key: tuple[str, int | None], figure: str) -> float:
    """Median of the peer's repetitions."""
    name, batch = key
    return statistics.median(
        row[figure]
        for row in rows
        if row.get("bench") == name and (batch is None or row.get("B") == batch)
    )


def table(folder: Path) -> str:
    """The figures as markdown."""
    about = json.loads((folder / "about.json").read_text())
    ours = {row["workload"]: row for row in read(folder / "engine.jsonl") if "workload" in row}
    peer = read(folder / "vllm.jsonl")
    lines = [
        f"{about['shape']}, {about['machine']}, commit {about['commit']}, beside {about['peer']} "
        "in the same sitting; medians.",
        "",
        "| workload | Slipstream | vLLM | ratio (above 1: ours is faster) |",
        "|---|---|---|---|",
    ]
    for name, (label, figure, key, peer_name, unit) in ROWS.items():
        if name not in ours:
            continue
        mine, theirs = ours[name][figure]["median"], peer_figure(peer, key, peer_name)
        ratio = theirs / mine if unit == "ms" else mine / theirs
        digits = ".2f" if unit == "ms" else ",.0f"
        lines.append(
            f"| {label} | {mine:{digits}} {unit} | {theirs:{digits}} {unit} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Rewrite the README between the two marks, or with `--check` say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    new = f"{head}{BEGIN}\n{table(newest())}\n{END}{tail}"
    if args.check:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
