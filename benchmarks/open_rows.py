"""The rows `open-50`, `open-70` and `open-90` of `make bench-gpu`: both engines under open load.

Rates are shares of the slower engine's peak, so that neither is overloaded. Every setting of vLLM
has a process of its own, and the first of them two: the rates are known only once ours has run.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from open_load import medians
from traces import FIGURES

HERE = Path(__file__).parent
LOADS = {f"open-{share}": share / 100 for share in (50, 70, 90)}
PEER_BUDGETS = (2048, 4096, 8192)
GOALS = dict(zip(FIGURES, (0.85, 0.85, 1.0, 1.0, 1.0, 1.0), strict=True))


def _call(
    engine: str, options: list[str], loads: list[float], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Measure one engine in a process; {} if it failed."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        output = Path(folder) / "open.json"
        command = [sys.executable, str(HERE / "open_load.py"), engine, str(output), *options]
        command += ["--loads", *map(str, loads)]
        subprocess.run(command, env=dict(environment), check=False)
        return json.loads(output.read_text()) if output.is_file() else {}


def measure(
    names: list[str],
    shape: str,
    environment: Mapping[str, str],
    checkpoint: Path | None,
    peer_environment: Mapping[str, str],
) -> dict[str, Any]:
    """Run these rows; without a checkpoint ours alone, at shares of its own peak."""
    loads = [LOADS[name] for name in names]
    ours = _call("ours", ["--shape", shape], [], environment)
    if not ours:
        return {}
    peak, peers = ours["peak"], {}

    def peer(budget: int, loads: list[float], *more: str) -> dict[str, Any]:
        options = ["--checkpoint", str(checkpoint), "--max-num-batched-tokens", str(budget)]
        return _call("vllm", ["--shape", shape, *options, *more], loads, peer_environment)

    first = {} if checkpoint is None else peer(PEER_BUDGETS[-1], [])
    if checkpoint is not None and not first:
        print("vLLM gave no peak rate: these rows have ours alone", file=sys.stderr)
    if first:
        peak = min(peak, first["peak"])
        for budget in PEER_BUDGETS:
            peers[f"vllm {budget}"] = peer(budget, loads, "--peak", str(peak))
    ours = _call("ours", ["--shape", shape, "--peak", str(peak)], loads, environment)
    sides = {"slipstream": ours, **peers}
    return {"shape": shape, "peak": peak, "rows": {n: _row(n, sides) for n in names}}


def _row(name: str, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of each side at a load, and ours over the peer's best."""
    found = {
        side: medians(data["loads"][f"{LOADS[name]:g}"]) for side, data in sides.items() if data
    }
    return found | {"ratios": ratios(found)}


def ratios(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return ours over the best setting's first tokens; of tokens between, over those of the
    setting whose first tokens have the best p99."""
    peers = [figures for side, figures in found.items() if side != "slipstream"]
    if not peers or "slipstream" not in found:
        return {}
    best = min(peers, key=lambda figures: figures["first p99"])
    least = {name: min(figures[name] for figures in peers) for name in FIGURES}
    against = {name: least[name] if name.startswith("first") else best[name] for name in FIGURES}
    return {name: round(found["slipstream"][name] / against[name], 3) for name in FIGURES}


def show(result: Mapping[str, Any]) -> str:
    """Return the table of a result, in ms."""
    lines = [f"{result['shape']}, peak {result['peak']:.1f} requests/s; ms"]
    lines.append(f"{'':24}" + "".join(f"{name:>13}" for name in FIGURES))
    for name, row in result["rows"].items():
        for side, figures in row.items():
            shown = "".join(f"{figures[figure]:13.2f}" for figure in FIGURES if figures)
            lines.append(f"{name:10}{side:14}{shown}")
    lines.append(f"{'to reach':24}" + "".join(f"{goal:13.2f}" for goal in GOALS.values()))
    return "\n".join(lines)
