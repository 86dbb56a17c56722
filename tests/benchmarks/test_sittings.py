"""Sittings of the GPU table: figures are kept as they come, go on when cut off, and are planned."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest
from fixtures.benchmarks import Instant

NAMES = (
    *("limits", "workloads", "shapes", "rows", "report", "driving", "side", "engine"),
    *("saturation", "traces", "open_load", "open_rows", "plan", "sweep", "step"),
)


def open_run(bench, path, **given):
    """Measure an engine that answers at once, as `open_load.py ours` does."""
    options = {"count": 4, "shorten": 40, "peak": None, "at_most": 1e9, "loads": [0.5, 0.7]}
    args = argparse.Namespace(**(options | {"seeds": [11, 12]} | given))
    record = bench.open_load.Record(path, {"engine": "ours", "count": args.count})
    bench.open_load.measure(Instant(), args, record)
    return json.loads(path.read_text())


def test_an_open_load_is_kept_by_traces_and_goes_on(bench, tmp_path, monkeypatch):
    """Every load has a trace before any has two, and what is there is not run again."""
    path, run = tmp_path / "open.json", bench.open_load.run
    numbers = iter(range(100))

    def cut_off(target, load):
        if next(numbers) == 5:  # a warm-up, the peak and three traces before it
            raise KeyboardInterrupt
        return run(target, load)

    monkeypatch.setattr(bench.open_load, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        open_run(bench, path, at_most=2000.0)
    begun = json.loads(path.read_text())
    assert [len(rows) for rows in begun["loads"].values()] == [2, 1]
    assert begun["rate"] == min(begun["peak"], 2000.0)
    whole = open_run(bench, path, at_most=2000.0)
    assert whole["peak"] == begun["peak"]
    assert whole["loads"]["0.7"][0] == begun["loads"]["0.7"][0]
    seeds = [[row["seed"] for row in rows] for rows in whole["loads"].values()]
    assert seeds == [[11, 12], [11, 12]]
    with pytest.raises(SystemExit, match="another rate"):
        open_run(bench, path, peak=1.0)
    with pytest.raises(SystemExit, match="another run"):
        open_run(bench, path, count=5)


def test_open_rows_are_kept_after_each_side(bench, tmp_path, monkeypatch):
    """A setting of the peer that fails leaves what all others have; then it alone is run."""
    failing, started = {"4096"}, []

    def process(command, **_):
        def given(name):
            return command[command.index(name) + 1] if name in command else None

        path, budget = Path(command[3]), given("--max-num-batched-tokens") or "2048"
        started.append(path.stem)
        if budget in failing:
            return subprocess.CompletedProcess(command, 1)
        data = json.loads(path.read_text()) if path.is_file() else {"peak": float(budget)}
        rate = float(given("--peak") or min(data["peak"], float(given("--at-most") or 1e9)))
        loads = command[command.index("--loads") + 1 :]
        row = dict.fromkeys(bench.traces.FIGURES, float(budget))
        data |= {"rate": rate, "loads": {load: [row] * 3 for load in loads}}
        path.write_text(json.dumps(data))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bench.open_rows.subprocess, "run", process)
    sides = bench.open_rows.Sides(["open-70"], "x", tmp_path, {}, tmp_path, {})
    kept = []
    result = bench.open_rows.measure(sides, kept.append)
    row = result["rows"]["open-70"]
    assert result["peak"] == 2048.0  # the slower one's
    assert list(row) == ["slipstream", "vllm 2048", "vllm 8192", "ratios"]
    assert len(kept) == 4
    assert list(kept[0]["rows"]["open-70"]) == ["vllm 8192", "ratios"]
    names = ["slipstream", "vllm-8192", "slipstream", "vllm-4096", "vllm-2048"]
    assert started == [f"open-x-{name}" for name in names]
    failing.clear()
    result = bench.open_rows.measure(sides, kept.append)
    assert started[5:] == ["open-x-vllm-4096"]
    assert len(result["rows"]["open-70"]) == 5


def test_saturation_goes_on_with_what_is_there(bench, tmp_path: Path) -> None:
    path, facts = tmp_path / "full.json", {"gpu": "x", "options": {"max_num_seqs": 8}}
    begun = bench.saturation.begun
    assert begun(path, facts) == facts | {"rows": {}}
    path.write_text(json.dumps(facts | {"rows": {"128-128": {"output_tok_s": 1.0}}}))
    assert list(begun(path, facts)["rows"]) == ["128-128"]
    with pytest.raises(SystemExit, match="another run"):
        begun(path, facts | {"gpu": "y"})


def test_rows_that_a_file_has_are_not_measured_again(bench, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench.step, "commit", lambda: "abc")
    rows = [bench.rows.ROWS[name] for name in ("decode-bs1", "decode-bs200", "ttft")]
    path = tmp_path / "ours.json"
    assert bench.step.missing(path, rows, 3) == rows
    path.write_text(
        json.dumps({"commit": "abc", "rows": {"decode-bs1": [3.5] * 3, "ttft": [5.0] * 8}})
    )
    assert bench.step.missing(path, rows, 3) == rows[1:]  # a first token has nine repetitions
    monkeypatch.setattr(bench.step, "commit", lambda: "def")
    with pytest.raises(SystemExit, match="has figures of abc"):
        bench.step.missing(path, rows, 3)


def test_a_sweep_gives_each_number_of_rows_as_it_ends(bench) -> None:
    engine = bench.engine.build("tiny", "auto", 128, max_num_seqs=3, device="cpu")
    target = bench.engine.EngineTarget(engine)
    steps = bench.sweep.measure(target, [1, 3, 2], 4, prompt=9)
    assert next(steps)[0] == 3
    assert [rows for rows, ms in steps if ms > 0] == [2, 1]


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_plan_has_every_row_and_is_near_what_was_measured(bench, is_beside: bool) -> None:
    names = [*bench.rows.ROWS, *bench.open_rows.LOADS, "sweep"]
    names += [f"saturation-{name}" for name in bench.saturation.ROWS]
    jobs = bench.plan.jobs(names, 3, is_beside, tunes=True)
    assert set(names) - {"sweep"} <= {job.name for job in jobs}
    assert "sweep" in {job.process for job in jobs}
    assert all(job.seconds > 0 for job in jobs)
    seconds = {job.name: job.seconds for job in jobs if job.process in ("ours, bf16", "saturation")}
    assert seconds["mixed-512"] == pytest.approx(3.2 * 512 * 256 / 9786, rel=0.01)
    assert seconds["decode-bs128"] < seconds["decode-bs200"] < 2 * seconds["decode-bs128"]
    assert seconds["saturation-1000-1000"] == pytest.approx(25 + 8, rel=0.15)  # measured
    few, all_of_them = (bench.plan.show(found) for found in (jobs[:1], jobs))
    assert float(few.split()[-5]) < float(all_of_them.split()[-5])


def test_tuning_covers_the_precisions_of_the_rows(bench) -> None:
    def tunings(*rows: str) -> dict[str, tuple[int, int]]:
        return bench.step.tunings(argparse.Namespace(rows=rows, max_num_batched_tokens=4096))

    assert tunings("open-70") == tunings("sweep") == {"none": (4096, 256)}
    assert tunings("saturation-128-128") == {"fp8": (8192, 1024)}
    both = tunings("decode-bs1", "fp8-decode-bs1", "saturation-128-128")
    assert both == {"none": (4096, 256), "fp8": (8192, 1024)}
