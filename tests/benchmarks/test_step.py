"""The GPU table's arithmetic: limits that can be worked out by hand, ratios, plots, a real run."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from slipstream_serve.server import repository_root

FOLDER = repository_root() / "benchmarks"
NAMES = (
    "limits",
    "workloads",
    "shapes",
    "rows",
    "report",
    "driving",
    "side",
    "accounts",
    "figures",
    "engine",
    "saturation",
)
ROWS = [
    "decode-bs1",
    "decode-bs32",
    "decode-bs128",
    "decode-bs200",
    "decode-bs256",
    "prefill",
    "mixed-512",
    "ttft",
    "long-context",
    "start",
    "fp8-decode-bs1",
    "fp8-decode-bs128",
    "fp8-mixed-512",
]


def side(rows: dict[str, list[float]], **more: object) -> dict[str, object]:
    return {"commit": "abc", "date": "2026-01-02", "about": {}, "rows": rows, "pareto": {}} | more


def test_the_rows(bench) -> None:
    assert list(bench.rows.ROWS) == ROWS


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("decode-bs1", 3.20),
        ("decode-bs32", 3.42),
        ("decode-bs128", 4.10),
        ("decode-bs256", 6.23),
        ("long-context", 10.5),
        ("prefill", 54_500),
        ("fp8-decode-bs1", 1.71),
    ],
)
def test_limits(bench, name: str, limit: float) -> None:
    assert bench.rows.ROWS[name].limit(bench.limits.CARDS["H200"]) == pytest.approx(
        limit, rel=0.005
    )


def test_every_card_has_its_own_limit(bench) -> None:
    """One that is not known is bounded by what its own run measured."""
    measured = {"read_tb_s": 2.0, "bf16_tflop_s": 300.0}
    rates_of, cards = bench.limits.rates_of, bench.limits.CARDS
    assert rates_of("NVIDIA H100 80GB HBM3", measured) == cards["H100"]
    assert rates_of("NVIDIA H200", {}) == rates_of(None, {}) == cards["H200"]
    assert rates_of("NVIDIA H100 PCIe", measured) == bench.limits.Rates(2e12, 300e12, 600e12)
    slow = side({"decode-bs1": [5.0]}, about={"gpu": "NVIDIA H100 80GB HBM3"})
    row = bench.report.merge(slow, None)["rows"][0]
    assert row["limit"] == pytest.approx(3.196 * 4.707 / 3.11, abs=1e-3)
    assert row["share"] == pytest.approx(row["limit"] / 5.0, abs=1e-3)


def test_a_limit_by_hand(bench) -> None:
    model = bench.limits.Model(
        {
            "hidden_size": 10,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 5,
            "num_hidden_layers": 3,
            "intermediate_size": 7,
            "vocab_size": 11,
        },
        bench.limits.CARDS["H200"],
    )
    assert model.in_layers == 3 * (10 * 20 + 2 * 10 * 10 + 20 * 10 + 3 * 10 * 7)
    assert model.kv_bytes == 3 * 2 * 2 * 5 * 2
    in_layers, head = model.products(9, 2)
    assert in_layers.read_seconds == pytest.approx(2 * model.in_layers / 4.707e12)
    assert in_layers.matrix_seconds == pytest.approx(9 * 2 * model.in_layers / 790e12)
    assert head.read_seconds == pytest.approx(220 / 4.707e12)
    assert head.matrix_seconds == pytest.approx(2 * 220 / 790e12)
    # Reading bounds a step of one token: every matrix and the cache once.
    read = 2 * model.in_layers + 220 + 100 * model.kv_bytes
    assert bench.limits.decode_step(model, 1, 100) == pytest.approx(read / 4.707e12)


def test_the_mixed_limit_is_that_of_its_operations(bench) -> None:
    """Every token through every layer, every output through the head; attention is 3 % more."""
    row = bench.rows.ROWS["mixed-512"]
    load = row.workload()
    rates = bench.limits.CARDS["H200"]
    model = bench.limits.Model(bench.shapes.SHAPES["llama-3.1-8b"], rates)
    outputs = 512 * 256
    inputs = sum(map(len, load.prompts))
    operations = 2 * (model.in_layers * (inputs + outputs - 512) + model.in_head * outputs)
    assert 0.95 < row.limit(rates) / (outputs / (operations / 790e12)) < 1.0


def test_ratios_say_how_much_better_ours_is(bench) -> None:
    table = bench.report.merge(
        side({"decode-bs1": [3.5, 3.4, 3.6], "prefill": [40e3, 44e3, 45e3], "start": [11.0]}),
        side({"decode-bs1": [4.9], "prefill": [42e3], "start": [70.0]}),
    )
    rows = {row["row"]: row for row in table["rows"]}
    assert list(rows) == ROWS
    decode, prefill = rows["decode-bs1"], rows["prefill"]
    assert (decode["ours"], decode["peer"], decode["ratio"]) == (3.5, 4.9, 1.4)
    assert decode["reached"] is True  # 4.89 / 3.55 = 1.377
    assert decode["spread"] == pytest.approx(0.2 / 3.5, abs=1e-4)
    assert decode["share"] == pytest.approx(3.196 / 3.5, abs=1e-3)
    assert prefill["ratio"] == pytest.approx(44 / 42, abs=1e-4)
    assert prefill["reached"] is False  # 45,000 / 42,900 = 1.049
    assert prefill["share"] == pytest.approx(44_000 / 54_480, abs=1e-3)
    assert rows["start"]["reached"] is False  # in seconds, whatever the peer takes
    assert rows["ttft"]["ours"] is rows["ttft"]["reached"] is None
    assert "abc" in bench.report.show(table)


def test_a_table_without_a_peer(bench) -> None:
    table = bench.report.merge(side({"decode-bs1": [3.5]}), None)
    row = table["rows"][0]
    assert (row["ours"], row["peer"], row["ratio"], row["reached"]) == (3.5, None, None, True)
    assert json.loads(json.dumps(table)) == table


def test_rows_of_an_earlier_sitting_say_so(bench) -> None:
    """What was not measured beside a peer is kept, and of several sittings the newest."""
    old = bench.report.merge(side({"ttft": [5.0], "prefill": [4e4]}), side({"ttft": [15.0]}))
    old |= {"commit": "old", "pareto": {"ours": {"1": 3.0}, "peer": {}}}
    middle = bench.report.merge(side({"ttft": [5.5]}), side({"ttft": [14.0]}))
    middle = bench.report.keep(middle | {"commit": "middle"}, old)
    now = bench.report.merge(
        side({"ttft": [5.2], "decode-bs1": [3.5]}), side({"decode-bs1": [4.9]})
    )
    rows = {row["row"]: row for row in bench.report.keep(now, middle)["rows"]}
    assert list(rows) == ROWS
    assert (rows["decode-bs1"]["ours"], rows["decode-bs1"].get("commit")) == (3.5, None)
    assert (rows["ttft"]["ours"], rows["ttft"]["commit"]) == (5.5, "middle")
    assert (rows["prefill"]["ours"], rows["prefill"]["commit"]) == (4e4, "old")
    assert (rows["mixed-512"]["ours"], rows["mixed-512"].get("commit")) == (None, None)
    assert middle["pareto"]["ours"] == {"1": 3.0}


class Scripted:
    """An engine that gives every request a token a step, at the times of a script."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        assert number == len(self.left)
        self.left.append(max_tokens)

    def step(self) -> tuple[int, int]:
        running = [n for n in self.left if n]
        self.left = [max(0, n - 1) for n in self.left]
        finished = sum(n == 1 for n in running)
        if not any(self.left):
            self.left = []
        return len(running), finished


def test_a_run_counts_tokens_and_full_steps(bench) -> None:
    run = bench.driving.run(Scripted(), bench.workloads.decode(3, max_tokens=5, num_input=2))
    assert [count for _, count in run.events] == [3] * 5
    assert (len(run.gaps_ms), run.num_input) == (4, 6)
    assert run.output_tok_s == pytest.approx(15 / run.seconds)
    uneven = bench.driving.Run([(1, 1), (2, 3), (4, 3), (7, 3), (8, 2)], 8, 3, 9)
    assert uneven.gaps_ms == [2000, 3000]
    assert (uneven.itl_ms, uneven.ttft_ms) == (2500, 1000)


@pytest.mark.parametrize("name", [name for name in ROWS if name != "start"])
def test_every_row_can_be_measured(bench, name: str, tmp_path: Path) -> None:
    output = bench.side.Side(tmp_path / "side.json", "scripted")
    bench.side.measure_rows(output, Scripted(), [bench.rows.ROWS[name]], 3)
    told = json.loads((tmp_path / "side.json").read_text())
    assert len(told["rows"][name]) == (9 if name == "ttft" else 3)
    again = bench.side.Side(tmp_path / "side.json", "scripted")
    again.add_pareto(4, 3.25)
    assert again.data["rows"] == told["rows"]


def test_a_cut_run_keeps_what_it_has(bench, tmp_path: Path) -> None:
    def figures():
        yield 1.5
        raise TimeoutError

    output = bench.side.Side(tmp_path / "side.json", "scripted")
    with pytest.raises(TimeoutError):
        output.add("prefill", figures())
    assert json.loads((tmp_path / "side.json").read_text())["rows"] == {"prefill": [1.5]}


def test_plots_hold_every_point(bench) -> None:
    pareto = {str(batch): 3.5 + batch / 50 for batch in bench.rows.PARETO}
    ours = side({}, pareto=pareto, about={"gpu": "NVIDIA H200"})
    table = bench.report.merge(ours, side({}, pareto={"1": 4.9, "32": 5.5}))
    for text in (bench.figures.share_plot(table), bench.figures.pareto_plot(table)):
        root = ElementTree.fromstring(text)
        circles = [e for e in root.iter() if e.tag.endswith("circle")]
        assert len(circles) == 9 + 2
        for circle in circles:
            assert 70 <= float(circle.get("cx")) <= 550
            assert 48 <= float(circle.get("cy")) <= 346
    empty = bench.report.merge(side({}), None)
    ElementTree.fromstring(bench.figures.pareto_plot(empty))


def test_the_readme_shows_at_most_eight_rows_that_have_a_peer(bench) -> None:
    every = {name: [5.0] for name in ROWS}
    alone, beside = (bench.report.merge(side(every), peer) for peer in (None, side(every)))
    assert bench.figures.readme_table(alone).count("\n| ") == 1  # its head
    assert bench.figures.readme_table(beside).count("\n| ") == 1 + 8


def test_the_page_of_figures_shows_what_was_measured(bench) -> None:
    def shown(ours: dict[str, object]) -> tuple[int, bool]:
        text = bench.figures.whole_table(bench.report.merge(ours, None))
        return text.count("\n| "), "first start takes 12.0 s" in text.replace("12.00", "12.0")

    assert shown(side({})) == (1, False)  # its head
    assert shown(side({"prefill": [43_000.0], "fp8-decode-bs1": [2.3]})) == (3, False)
    every = {name: [5.0] for name in ROWS}
    assert shown(side(every, start_uncached=[12.0])) == (len(ROWS) + 1, True)


def test_every_row_says_how_old_it_is(bench, tmp_path: Path, monkeypatch) -> None:
    table = bench.report.merge(side({"prefill": [43_000.0], "decode-bs1": [3.5]}), None)
    table |= {"commit": "abc", "date": "2026-11-26"}
    next(r for r in table["rows"] if r["row"] == "prefill")["commit"] = "def"
    (tmp_path / "2026-11-24-def-h200.json").touch()
    monkeypatch.setattr(bench.figures, "RESULTS", tmp_path)
    text = bench.figures.whole_table(table)
    assert "commit abc on 26 November 2026, beside" in text
    assert "(def, 24 November) |" in text
    assert "measured 24 November 2026 to 26 November 2026:" in bench.figures.readme_table(table)


CEILINGS = {"read_tb_s": 4.0, "bf16_tflop_s": 500.0}


def test_an_account_by_hand(bench) -> None:
    layers, head = 6_979_321_856, 525_336_576  # weights of the 8B shape
    account, rows = bench.accounts.account, bench.rows.ROWS
    read, computed, cache, ours, goal = account(rows["decode-bs128"], 6.0, 7.35, CEILINGS)
    assert read == pytest.approx((layers + head) * 2 / 4e12)
    in_attention = 4 * 32 * 32 * 128 * 128 * 256
    assert computed == pytest.approx((2 * 128 * (layers + head) + in_attention) / 500e12)
    assert cache == pytest.approx(128 * 256 * 131_072 / 4e12)
    assert (ours, goal) == pytest.approx((6e-3, 5.5e-3))
    read, computed, *_ = account(rows["fp8-decode-bs1"], 2.0, 3.0, CEILINGS)
    assert read == pytest.approx((layers + 2 * head) / 4e12)
    *_, ours, goal = account(rows["mixed-512"], 13_107.2, 9_200, CEILINGS)
    assert (ours, goal) == pytest.approx((10.0, 131_072 / 12_000))


def test_accounts_have_the_rates_of_their_own_sitting(
    bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"gpu": "NVIDIA H200", "ceilings": CEILINGS}
    rows = {"decode-bs1": [3.5], "start": [9.0], "ttft": [5.0]}
    table = bench.report.merge(
        side(rows, about=about), side({"decode-bs1": [4.9], "start": [99.0]})
    )
    cells = "0.03 ms | 0.01 ms | 3.50 ms | 3.56 ms |"

    def shown() -> list[str]:
        return bench.accounts.accounts_table(table).splitlines()[2:]

    assert shown() == [f"| decode, batch 1 | 3.75 ms | {cells}"]  # what has a peer and a limit
    slower = table | {"ceilings": CEILINGS | {"read_tb_s": 3.0}}
    (tmp_path / "2026-01-01-def-h200.json").write_text(json.dumps(slower))
    monkeypatch.setattr(bench.accounts, "RESULTS", tmp_path)
    table["rows"][0]["commit"] = "def"
    assert shown()[0].startswith("| decode, batch 1 | 5.00 ms | ")
    table["rows"][0]["commit"] = "abc"
    assert shown() == []  # nobody knows its machine


@pytest.mark.rest
@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, str(FOLDER / "step.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == ["bench-gpu: torch sees no GPU on this machine"]


def delays(wiring: str, streams: int, rate: int, p50: float, p99: float, added: float) -> dict:
    figures = {"p50_ms": p50, "p99_ms": p99, "added_p50_ms": added}
    return {"wiring": wiring, "streams": streams, "rate": rate} | figures


STREAMS = {
    "cores": 16,
    "commit": "abc",
    "date": "2026-11-24",
    "rows": [
        delays("fused", 1, 250, 0.6124, 1.2, 2.2),
        delays("fused", 256, 100, 3.0, 7.0, 50.0),
        delays("composed", 1, 250, 0.7, 67.0, 3.02),
    ],
}


def test_sides_of_a_sitting_are_put_together(bench, tmp_path: Path) -> None:
    ours = side({"decode-bs1": [3.5]}, about={"gpu": "NVIDIA H200"}, start_uncached=[12.0])
    (tmp_path / "ours").write_text(json.dumps(ours))
    (tmp_path / "peer").write_text(json.dumps(side({"decode-bs1": [4.9]})))
    command = [sys.executable, str(FOLDER / "step.py"), "merge", str(tmp_path / "ours")]
    command += [str(tmp_path / "peer"), "--results", str(tmp_path / "results")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    table = json.loads(result.stdout.splitlines()[-1])
    kept = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    assert kept == {"2026-01-02-abc-h200.json": table, "step-h200.json": table}
    assert {"commit", "gpu", "ceilings", "rows"} <= set(table)
    assert table["rows"][0]["ratio"] == 1.4
    assert "start without compiled kernels: 12.00 s" in result.stdout
    other = bench.report.merge(side({"ttft": [7.0]}, about={"gpu": "NVIDIA H100 80GB HBM3"}), None)
    tables = {"H200": table, "H100": other}
    made = bench.figures.files(tables, STREAMS)
    readme = made[bench.figures.README]
    assert readme.count("| decode, batch 1 | 3.50 ms/token | 4.90 | 1.40 |") == 1
    assert "first token" not in readme.partition("## Speed")[2]  # no peer beside it
    page = made[bench.figures.FIGURES]
    assert bench.accounts.accounts_table(table) in made[bench.figures.BENCHMARKS]
    assert page.count("\n| first token, batch 1, 128 in | 7.00 ms | - | - | ") == 1  # no goal
    assert page.count("\n| 1 x 250 | 0.612 ms | 1.2 ms | 0.7 ms | 67 ms |\n") == 1
    assert page.count("waits 2.2 ms fused and 3 ms composed for them") == 1
    assert "256 x 100" not in page  # of one wiring alone
    assert page.count("| decode, batch 1 | 3.50 ms/token | 4.90 | **1.40** |") == 1


@pytest.mark.rest
def test_a_start_is_measured_from_a_real_checkpoint(tmp_path: Path) -> None:
    make = [sys.executable, str(FOLDER / "make_checkpoint.py"), str(tmp_path), "--shape", "tiny"]
    subprocess.run(make, check=True)
    command = [sys.executable, str(FOLDER / "start.py"), str(tmp_path), "--repeat", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(result.stdout.splitlines()[-1])
    assert len(told["cached"]) == len(told["uncached"]) == 1
    assert 0 < told["cached"][0] < 60
    assert "runner" in result.stdout


@pytest.mark.rest
def test_a_full_engine_is_counted_in_its_steady_part(bench) -> None:
    """Sequences begin at ages of their own, new ones always wait, and nothing is left behind."""
    engine = bench.engine.build("tiny", "auto", 128, max_num_seqs=8, device="cpu")
    row = bench.saturation.Row(24, 16, {})
    ages = bench.saturation.ages_of(row, 8, 128)
    full = bench.saturation.Full(engine, row, ages, seed=5)
    while not full.has_started:
        full.step()
    counts = [full.step() for _ in range(64)]
    assert engine.status().waiting >= 32
    assert 6 <= sum(counts) / len(counts) <= 8  # tokens a step: all sequences, less admissions
    full.drain()
    engine.check_integrity()
    assert not engine.has_work
    assert bench.saturation.measure(engine, row, ages, 0.05)["output_tok_s"] > 0
    assert bench.saturation.measure(engine, row, ages, 0.0)["of_thirds"], "no step, no figure"
    fit = bench.saturation.sequences_that_fit
    assert fit(bench.saturation.ROWS["1000-1000"], 15_010, 64, 8192) == 10
    assert fit(bench.saturation.ROWS["2048-128"], 10**9, 1024, 8192) == 481  # 128 steps of prompts


@pytest.mark.parametrize("name", ["128-128", "1000-1000", "2048-128", "5000-500", "20000-2000"])
def test_ages_are_even_when_the_last_sequence_has_started(bench, name: str) -> None:
    """Also where computing the prompts of the start takes as long as most outputs do."""
    row, tokens = bench.saturation.ROWS[name], 8192
    count = bench.saturation.sequences_that_fit(row, 1_700_000, 1024, tokens)
    waiting, running = sorted(bench.saturation.ages_of(row, count, tokens)), []
    left = 0
    while waiting or left:
        running = [age + 1 for age in running]
        room = tokens - len(running)
        while room and (waiting or left):
            left = left or row.num_input + waiting[-1]
            room, left = room - min(room, left), left - min(room, left)
            if not left:
                running.append(waiting.pop())
    ended = sum(age >= row.num_output for age in running)
    assert ended <= 0.1 * count
    quarters = [
        sum(row.num_output * i / 4 <= age < row.num_output * (i + 1) / 4 for age in running)
        for i in range(4)
    ]
    assert max(quarters) <= 0.4 * count
    assert min(quarters) >= 0.12 * count


@pytest.mark.rest
@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
@pytest.mark.parametrize(
    "line",
    [
        *("experts", "kernel_times", "parts", "prefill_cache", "sweep OUT", "saturation OUT"),
        *("idle_tuning", "mixtures", "weights4", "deterministic", "open_load ours OUT"),
        "open_load compare . .",
    ],
)
def test_parts_that_need_a_gpu_say_so(line: str, tmp_path: Path) -> None:
    name, *options = line.split()
    path = str(FOLDER / f"{name}.py")
    command = [sys.executable, path, *options]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60
    )
    assert not list(tmp_path.iterdir())
    assert result.returncode == 2
    assert result.stderr.splitlines() == [f"{path}: torch sees no GPU on this machine"]
