"""One engine's measurements, kept in a file that is written after each of them."""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import driving
import workloads
from driving import Target
from report import commit
from rows import PARETO, PARETO_TOKENS, ROWS, Row


class Side:
    """What one engine reached: `about`, `rows` (name -> one figure a repetition), `pareto`."""

    def __init__(self, path: Path, engine: str) -> None:
        self._path = path
        self.data: dict[str, Any] = {
            "engine": engine,
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "about": {},
            "rows": {},
            "pareto": {},
        }
        if path.is_file():
            self.data = json.loads(path.read_text())

    def about(self, **facts: object) -> None:
        """Versions, settings."""
        self.data["about"] |= facts
        self._write()

    def add(self, name: str, figures: Iterable[float], **more: object) -> None:
        """A row's repetitions; each is kept as soon as it is there."""
        began = time.perf_counter()
        kept: list[float] = []
        for figure in figures:
            kept.append(round(figure, 4))
            self.data["rows"][name] = kept
            self._write()
        self.data |= more
        self._write()
        seconds = time.perf_counter() - began
        print(f"{self.data['engine']:10} {name:18} {_shown(kept)} ({seconds:.1f} s)", flush=True)

    def add_pareto(self, batch: int, itl_ms: float) -> None:
        """The time between a batch's tokens, 128 in."""
        self.data["pareto"][str(batch)] = round(itl_ms, 4)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def _shown(figures: list[float]) -> str:
    digits = 0 if figures[0] >= 1000 else 3
    return " ".join(f"{figure:,.{digits}f}" for figure in figures)


def measure_rows(side: Side, target: Target, rows: list[Row], repeat: int) -> None:
    """Every row of the list that is a workload."""
    for row in rows:
        if row.make is not None:
            side.add(row.name, driving.measure(target, row, repeat))


def measure_pareto(side: Side, target: Target, batches: tuple[int, ...] = PARETO) -> None:
    """Short decodes at each batch."""
    for batch in batches:
        gaps = driving.run(target, workloads.decode(batch, PARETO_TOKENS)).gaps_ms
        side.add_pareto(batch, statistics.median(gaps))


def wanted(names: list[str], accepts: Callable[[Row], bool]) -> list[Row]:
    """The rows of these names (all, if there are none) that one process can run."""
    return [row for row in ROWS.values() if (not names or row.name in names) and accepts(row)]
