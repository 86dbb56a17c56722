"""The reuse benchmark: what it offers, what it makes of the answers, a small run of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream_serve.server import repository_root

FOLDER = repository_root() / "benchmarks"
CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
NAMES = (
    "limits",
    "workloads",
    "shapes",
    "rows",
    "report",
    "driving",
    "side",
    "reuse_workloads",
    "reuse",
)


class Scripted:
    """An engine that gives every request a token a step, its number, and remembers its prompts."""

    vocabulary = 1000

    def __init__(self, bench) -> None:
        self.output = bench.reuse_workloads.Output
        self.prompts: dict[int, list[int]] = {}
        self.left: dict[int, int] = {}

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        assert number not in self.prompts
        self.prompts[number], self.left[number] = prompt, max_tokens

    def step(self) -> list[tuple[int, list[int], bool]]:
        told = [self.output(n, [n], left == 1) for n, left in self.left.items()]
        self.left = {n: left - 1 for n, left in self.left.items() if left > 1}
        return told


def test_a_chat_asks_with_all_that_was_said(bench) -> None:
    sizes = bench.reuse_workloads.Sizes(users=2, turns=3, system=50, question=4, answer=5)
    target = Scripted(bench)
    figures = bench.reuse_workloads.Workloads(target, sizes).chat()
    prompts = list(target.prompts.items())
    assert [len(prompt) for _, prompt in prompts] == [54] * 2 + [63] * 2 + [72] * 2
    assert len({tuple(prompt[:50]) for _, prompt in prompts}) == 1
    for (number, before), (_, after) in zip(prompts, prompts[2:], strict=False):
        assert after[: len(before) + 5] == before + [number] * 5
    assert figures.requests_s * 5 == pytest.approx(figures.output_tok_s)
    assert 0 < figures.first_token_ms <= figures.first_token_p99_ms


def test_no_repetition_offers_what_was_offered(bench) -> None:
    sizes = bench.reuse_workloads.Sizes(4, 60, 9, 3, mixed=5)
    target = Scripted(bench)
    loads = bench.reuse_workloads.Workloads(target, sizes)
    for _ in range(2):
        loads.shared()
    loads.mixed(max_tokens=2)
    prompts = list(target.prompts.values())
    beginnings = [tuple(prompt[:60]) for prompt in prompts[:16]]
    assert len(set(beginnings[:8])) == len(set(beginnings[8:])) == 1
    assert len(set(beginnings)) == 2
    assert len({tuple(prompt[60:]) for prompt in prompts[:16]}) == 16
    assert all(128 <= len(prompt) <= 1024 for prompt in prompts[16:])
    assert len(prompts) == 21


def test_an_answer_that_ends_early_is_no_figure(bench) -> None:
    target = Scripted(bench)
    whole = target.submit
    target.submit = lambda number, prompt, max_tokens: whole(number, prompt, max_tokens - 1)
    loads = bench.reuse_workloads.Workloads(target, bench.reuse_workloads.Sizes(2, 9, 9, 4))
    with pytest.raises(AssertionError, match="ended early"):
        loads.shared()


def test_what_is_not_asked_for_does_not_run(bench, tmp_path: Path) -> None:
    sizes = bench.reuse_workloads.Sizes(4, 60, 9, 3, users=2, turns=2, system=9, mixed=5)
    side = bench.side.Side(tmp_path / "side.json", "scripted")
    for only in (["chat"], ["mixed"], ["shared"]):
        target = Scripted(bench)
        bench.reuse.measure(side, bench.reuse_workloads.Workloads(target, sizes), 2, only)
        assert len(target.prompts) == {"chat": 12, "mixed": 0, "shared": 24}[only[0]]
    assert {name: len(figures) for name, figures in side.data["rows"].items()} == {
        "chat": 2,
        "chat-ttft": 2,
        "shared-cold": 2,
        "shared-warm": 2,
    }


def test_the_table(bench) -> None:
    about = {"commit": "abc", "about": {"gpu": "G"}}
    ours = {"shared-cold": [310, 290, 305], "chat": [130], "chat-ttft": [60], "mixed-kept": [0.98]}
    peer = {"shared-cold": [170], "chat": [100], "chat-ttft": [100]}
    table = bench.reuse.merge(about | {"rows": ours}, about | {"rows": peer})
    rows = {row["row"]: row for row in table["rows"]}
    assert rows["shared-cold"]["ours"] == 305
    assert rows["shared-cold"]["ratio"] == pytest.approx(305 / 170)
    reached = {name: row["reached"] for name, row in rows.items()}
    assert reached == {
        "shared-cold": True,
        "shared-warm": None,
        "chat": True,
        "chat-ttft": True,
        "mixed-kept": False,
    }
    assert "missed" in bench.reuse.show(table)
    alone = bench.reuse.merge(about | {"rows": ours}, None)
    assert [row["reached"] for row in alone["rows"]] == [True, None, None, None, False]


@pytest.mark.rest
def test_a_small_run_of_the_default_model(tmp_path: Path) -> None:
    """All of our side, as it runs on a GPU, and the table of it."""
    output = tmp_path / "table.json"
    options = ["--small", "--repeat", "1", "--checkpoint", str(CHECKPOINT), "--vocabulary", "400"]
    options += ["--kv-cache-tokens", "4096", "--max-num-batched-tokens", "64"]
    script = str(FOLDER / "reuse.py")
    command = [sys.executable, script, "ours", str(tmp_path / "ours.json"), *options]
    subprocess.run(command, check=True, timeout=240)
    command = [sys.executable, script, "merge", str(tmp_path / "ours.json")]
    told = subprocess.run(
        [*command, "--output", str(output)], check=True, capture_output=True, text=True, timeout=60
    )
    table = json.loads(output.read_text())
    assert json.loads(told.stdout.splitlines()[-1]) == table
    assert all(row["ours"] > 0 for row in table["rows"])
    assert table["peer"] is None
    assert table["ours"]["reused_blocks"] > 0 == table["ours"]["reused_blocks_without"]
