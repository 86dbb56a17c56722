"""How long the rows of `make bench-gpu` take on an H200: `--plan`, which needs no GPU.

Reckoned from the newest table of an H200 (`results/step-h200.json`) and the times below, which were
measured there: starts, prompts of the saturation rows, peaks under open load. Beside other work, or
where kernels have to be compiled, it takes longer.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import open_rows
import saturation
from open_load import SEEDS
from report import NEWEST
from rows import ROWS, Row

SATURATION, SWEEP = "saturation-", "sweep"
_STARTS = {"ours": 20.0, "vLLM": 105.0}  # s, of random weights, and with a peak that is not slow
_COMPILES = 40.0  # once a machine, of our kernels
_CHECKPOINT = 25.0  # writing 16 GB
_TUNE = 70.0  # of each precision
_SWEEP = 40.0  # and a start
_PEAK = 32.0  # requests a second, of open load
_REQUESTS, _LAST_S = 300, 8.0  # of a trace, and the longest answer behind its last arrival
_PROMPT_RATE = 58_000  # tokens a second of fp8, with attention of some 1,000 tokens before them
_SLOWER = 40_000  # tokens before them with which a prompt takes twice as long
_CACHE, _SEQUENCES, _STEP = 1_700_000, 1024, 8192  # tokens and rows of `--profile throughput`
_STEADY_S = 8.0


@dataclass(frozen=True, slots=True)
class Job:
    """A part of a run: seconds of a process, or of a row in it."""

    process: str
    name: str
    seconds: float


def jobs(names: Sequence[str], repeat: int, has_peer: bool, tunes: bool) -> list[Job]:
    """List what rows of these names consist of, in the order in which they run."""
    found = [*_open(names, has_peer), *_saturated(names)]
    if SWEEP in names:
        found += [Job(SWEEP, "start", _STARTS["ours"]), Job(SWEEP, "1 to 256 rows", _SWEEP)]
    found += _tables([ROWS[name] for name in names if name in ROWS], repeat, has_peer)
    before = [Job("first", "compiling", _COMPILES)] if found else []
    if tunes:
        is_fp8 = any(name.startswith(("fp8-", SATURATION)) for name in names)
        is_bf16 = any(not name.startswith(("fp8-", SATURATION)) for name in names)
        before += [Job("first", "tuning", _TUNE * (is_fp8 + is_bf16))]
    if has_peer and any(job.process.startswith("vLLM") for job in found):
        before += [Job("first", "writing the checkpoint", _CHECKPOINT)]
    return before + found


def _open(names: Iterable[str], has_peer: bool) -> list[Job]:
    loads = {name: open_rows.LOADS[name] for name in names if name in open_rows.LOADS}
    if not loads:
        return []
    peak_s = 1.25 * (_REQUESTS / _PEAK + _LAST_S)  # a quarter of it warms up
    found = [Job("ours, peak", "start", _STARTS["ours"]), Job("ours, peak", "peak", peak_s)]
    settings = [f"vLLM {budget}" for budget in reversed(open_rows.PEER_BUDGETS)]
    order = [settings[0], "ours", *settings[1:]] if has_peer else ["ours"]
    for side in order:
        found.append(Job(side, "start", _STARTS[side.split()[0]]))
        warm_s = peak_s if side == settings[0] else peak_s / 5
        found.append(Job(side, "warm-up", warm_s))
        for name, load in loads.items():
            trace_s = _REQUESTS / (load * _PEAK) + _LAST_S
            found.append(Job(side, name, len(SEEDS) * trace_s))
    return found


def _saturated(names: Iterable[str]) -> list[Job]:
    found = []
    for name in names:
        if not name.startswith(SATURATION):
            continue
        row = saturation.ROWS[name.removeprefix(SATURATION)]
        count = saturation.sequences_that_fit(row, _CACHE, _SEQUENCES, _STEP)
        prompts = [row.num_input + age for age in saturation.ages_of(row, count, _STEP)]
        start_s = sum(size * (1 + size / 2 / _SLOWER) for size in prompts) / _PROMPT_RATE
        found.append(Job("saturation", name, start_s + _STEADY_S))
    return [Job("saturation", "start", _STARTS["ours"]), *found] if found else []


def _tables(rows: list[Row], repeat: int, has_peer: bool) -> list[Job]:
    recorded = {row["row"]: row for row in json.loads(NEWEST["H200"].read_text())["rows"]}
    found = []
    for side, column in [("ours", "ours"), *([("vLLM", "peer")] if has_peer else [])]:
        figures = {name: row[column] for name, row in recorded.items()}
        for is_fp8 in (False, True):
            of_process = [row for row in rows if row.is_fp8 == is_fp8]
            process = f"{side}, {'fp8' if is_fp8 else 'bf16'}"
            if any(row.make is not None for row in of_process) or (side == "vLLM" and of_process):
                found.append(Job(process, "start", _STARTS[side]))
            for row in of_process:
                if (seconds := _row_s(row, figures, repeat, side)) > 0:
                    found.append(Job(process, row.name, seconds))
    return found


def _row_s(row: Row, figures: dict[str, float], repeat: int, side: str) -> float:
    """Return the seconds of a row's repetitions and its warm-up."""
    if row.make is None:  # a start from the checkpoint, with compiled kernels and without
        return _CHECKPOINT + 2 * repeat * figures[row.name] if side == "ours" else 0.0
    load = row.workload()
    prompt_s = sum(map(len, load.prompts)) / figures["prefill"]
    if row.figure == "itl_ms":
        near = min(
            (name for name in figures if ROWS[name].figure == "itl_ms"),
            key=lambda name: (name != row.name, abs(_batch(name) - _batch(row.name))),
        )
        run_s = prompt_s + load.max_tokens * figures[near] / 1e3
    elif row.figure == "output_tok_s":
        run_s = row.num_tokens() / figures[row.name]
    else:
        run_s = prompt_s + load.max_tokens * figures["decode-bs1"] / 1e3
    count = 1.0 if row.runs_a_repetition < 1 else repeat * row.runs_a_repetition
    return (count + 0.2) * run_s


def _batch(name: str) -> int:
    return int(name.rpartition("bs")[2]) if "bs" in name else 0


def show(found: Sequence[Job]) -> str:
    """Return the plan as a table: seconds of each part, of each process, and the minutes of all."""
    lines = []
    for process, parts in groupby(found, key=lambda job: job.process):
        listed = list(parts)
        total = sum(job.seconds for job in listed)
        lines.append(f"{process:14}{'':24}{total:7.0f} s")
        lines += [f"{'':14}{job.name:24}{job.seconds:7.0f}" for job in listed]
    lines.append(f"{sum(job.seconds for job in found) / 60:.1f} minutes on an H200")
    return "\n".join(lines)
