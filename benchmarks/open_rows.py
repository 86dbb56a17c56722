"""The rows `open-50`, `open-70` and `open-90` of `make bench-gpu`: both engines under open load.

Rates are shares of the slower engine's peak, so that neither is overloaded. Every setting of vLLM
has a process of its own, and ours two: the rates are known only once both peaks are. Every trace is
kept as it ends, and what is there is not measured again.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_load import SEEDS, medians
from traces import FIGURES

HERE = Path(__file__).parent
LOADS = {f"open-{share}": share / 100 for share in (50, 70, 90)}
PEER_BUDGETS = (2048, 4096, 8192)
OURS, PEER = "slipstream", "vllm "  # the latter before its tokens a step
# A step with prompts is what the p90 between tokens meets, or not, by how many there are: no goal.
GOALS = dict(zip(FIGURES, (0.85, 0.85, 1.0, 1.0, math.inf, 1.0), strict=True))


@dataclass(frozen=True, slots=True)
class Sides:
    """The engines under load, each in a process, and the files to which they write.

    Args:
        names: of rows.
        shape: of both.
        folder: of a file for each side, which grows with every trace; what is there is kept.
        environment, peer_environment: of the processes.
        checkpoint: of the peer; None: there is none.
        shorten: divide all lengths, for machines without a GPU.
    """

    names: list[str]
    shape: str
    folder: Path
    environment: Mapping[str, str]
    checkpoint: Path | None
    peer_environment: Mapping[str, str]
    shorten: int = 1

    @property
    def loads(self) -> list[float]:
        """Shares of the peak."""
        return [LOADS[name] for name in self.names]

    def read(self, side: str) -> dict[str, Any]:
        """Return what a side has so far."""
        path = self._path(side)
        return json.loads(path.read_text()) if path.is_file() else {}

    def run(self, side: str, loads: list[float], *rate: str) -> dict[str, Any]:
        """Measure what a side lacks, and return what it has then; {} if it has nothing."""
        found = self.read(side)
        counts = [len(found.get("loads", {}).get(f"{load:g}", ())) for load in loads]
        if "rate" in found and all(count >= len(SEEDS) for count in counts):
            print(f"{side}: is there already, in {self._path(side)}", flush=True)
            return found
        budget = side.removeprefix(PEER)
        engine, options = "ours", ["--shape", self.shape, "--shorten", str(self.shorten), *rate]
        if budget != side:
            engine = "vllm"
            options += ["--checkpoint", str(self.checkpoint), "--max-num-batched-tokens", budget]
        command = [sys.executable, str(HERE / "open_load.py"), engine, str(self._path(side))]
        command += [*options, "--loads", *map(str, loads)]
        environment = self.environment if engine == "ours" else self.peer_environment
        self.folder.mkdir(parents=True, exist_ok=True)
        if subprocess.run(command, env=dict(environment), check=False).returncode:
            print(f"{side}: failed; figures until then are kept", file=sys.stderr, flush=True)
        return self.read(side)

    def _path(self, side: str) -> Path:
        return self.folder / f"open-{self.shape}-{side.replace(' ', '-')}.json"


def measure(sides: Sides, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the rows; without a checkpoint ours alone, at shares of its own peak.

    `keep` gets the table after each side. The peer's first setting measures its peak, too: so every
    other side starts once.
    """
    own = sides.run(OURS, [])
    if "peak" not in own:
        return {}
    order, rate = [OURS], own["peak"]
    if sides.checkpoint is not None:
        first = f"{PEER}{PEER_BUDGETS[-1]}"
        found = sides.run(first, sides.loads, "--at-most", str(own["peak"]))
        if "rate" in found:
            rate = found["rate"]
            order += [f"{PEER}{budget}" for budget in reversed(PEER_BUDGETS[:-1])]
            keep(table(sides, rate))
        else:
            print("vLLM gave no peak rate: these rows have ours alone", file=sys.stderr)
    result = table(sides, rate)
    for side in order:
        sides.run(side, sides.loads, "--peak", str(rate))
        result = table(sides, rate)
        keep(result)
    return result


def table(sides: Sides, rate: float) -> dict[str, Any]:
    """Return the table of what has been measured until now."""
    names = [OURS, *(f"{PEER}{budget}" for budget in PEER_BUDGETS)]
    found = {name: data for name in names if (data := sides.read(name)).get("rate") == rate}
    rows = {name: _row(name, found) for name in sides.names}
    return {"shape": sides.shape, "peak": rate, "rows": rows, "sides": found}


def _row(name: str, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of each side at a load, and ours over the peer's best."""
    load = f"{LOADS[name]:g}"
    found = {
        side: medians(rows) for side, data in sides.items() if (rows := data["loads"].get(load))
    }
    return found | {"ratios": ratios(found)}


def ratios(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return ours over the best setting's first tokens; of tokens between, over those of the
    setting whose first tokens have the best p99."""
    peers = [figures for side, figures in found.items() if side != OURS]
    if not peers or OURS not in found:
        return {}
    best = min(peers, key=lambda figures: figures["first p99"])
    least = {name: min(figures[name] for figures in peers) for name in FIGURES}
    against = {name: least[name] if name.startswith("first") else best[name] for name in FIGURES}
    return {name: round(found[OURS][name] / against[name], 3) for name in FIGURES}


def show(result: Mapping[str, Any]) -> str:
    """Return the table of a result, in ms."""
    lines = [f"{result['shape']}, peak {result['peak']:.1f} requests/s; ms, of so many traces"]
    lines.append(f"{'':24}" + "".join(f"{name:>13}" for name in FIGURES))
    for name, row in result["rows"].items():
        load = f"{LOADS[name]:g}"
        for side, figures in row.items():
            traces = len(result["sides"].get(side, {}).get("loads", {}).get(load, ()))
            shown = "".join(f"{figures[figure]:13.2f}" for figure in FIGURES if figures)
            lines.append(f"{name:10}{side:11}{traces or '':>3}{shown}")
    lines.append(f"{'to reach':24}" + "".join(f"{goal:13.2f}" for goal in GOALS.values()))
    return "\n".join(lines)
