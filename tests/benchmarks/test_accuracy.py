"""accuracy.py: parts say what the whole would, in few bytes; what a run keeps."""

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.quantize import tiny
from fixtures.quantize.live import Live
from slipstream.layers.residual import Residual
from slipstream_quantize import measure
from slipstream_quantize.job import Job
from slipstream_quantize.opened import Opened, Running
from slipstream_quantize.recipe import RECIPES

NAMES = ("quality", "accuracy_models", "accuracy_metrics", "limits", "rows", "report")
NAMES = (*NAMES, "accuracy_table", "accuracy")
LENGTH, AT_ONCE = 40, 7


def log_probs(opened: Opened, text: torch.Tensor) -> torch.Tensor:
    sums = torch.stack([each for _, each in Running(opened, text).sums()])
    logits = opened.decoder.logits(Residual(sums.flatten(0, 1))).float()
    return logits.log_softmax(-1).view(len(text), LENGTH, -1)[:, :-1]


@torch.inference_mode()
def test_parts_say_what_the_whole_says(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = bench.accuracy_metrics
    opened = Opened(tiny.checkpoint(tmp_path, "gemma3"), "cpu")
    text = torch.arange(6 * LENGTH).view(6, LENGTH) * 7 % 256
    before = log_probs(opened, text)
    monkeypatch.setattr(measure, "LOGIT_BYTES", AT_ONCE * 256 * 4)
    _, no_kl, sums = metrics.bits_and_kl(opened, text, "auto", None)
    assert no_kl is None
    assert metrics.bits_and_kl(opened, text, "auto", sums)[1] == 0
    Job(opened, RECIPES["fp8"], None).run()
    after = log_probs(opened, text)
    bits, kl, _ = metrics.bits_and_kl(opened, text, "auto", sums)
    wanted = -after.gather(2, text[:, 1:, None]).sum((1, 2)) / math.log(2)
    torch.testing.assert_close(torch.tensor(bits), wanted, rtol=1e-5, atol=1e-4)
    compared = before[: metrics.KL_PIECES], after[: metrics.KL_PIECES]
    each = (compared[0].exp() * (compared[0] - compared[1])).sum(-1)
    assert kl == pytest.approx(float(each.mean()), rel=1e-3)
    assert kl > 0


@torch.inference_mode()
def test_agreement_in_parts(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = bench.accuracy_metrics
    opened = Opened(tiny.checkpoint(tmp_path), "cpu")
    prompts = torch.arange(3 * metrics.PROMPT).view(3, -1) * 7 % 256
    written = metrics.greedy(opened, prompts, 20)
    monkeypatch.setattr(measure, "LOGIT_BYTES", AT_ONCE * 256 * 4)
    assert metrics.agreement(opened, written, "auto") == (1.0, 20.0)
    written[0, metrics.PROMPT + 12] += 1  # so one differs there, and those behind it may
    same, first = metrics.agreement(opened, written % 256, "auto")
    assert same < 1
    assert first == pytest.approx((12 + 20 + 20) / 3)


@torch.inference_mode()
def test_a_large_vocabulary_is_compared(bench: SimpleNamespace, tmp_path: Path) -> None:
    """Logits of 128 positions are 134 MB, and a comparison needs several such tables."""
    sizes = {"vocab_size": 262_144, "hidden_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
    opened = Opened(tiny.checkpoint(tmp_path, **sizes), "cpu")
    text = torch.arange(128)[None] * 7 % 256
    with Live() as live:
        _, _, sums = bench.accuracy_metrics.bits_and_kl(opened, text, "auto", None)
        bench.accuracy_metrics.bits_and_kl(opened, text, "auto", sums)
    assert live.most <= 320 << 20


@pytest.mark.rest
@torch.inference_mode()
def test_a_run_keeps_what_is_known(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure has the commit that it was measured at, whatever is measured beside it later."""
    accuracy, path = bench.accuracy, tiny.checkpoint(tmp_path, max_position_embeddings=256)
    model = bench.accuracy_models.Model("tiny", path, "tiny", has_questions=False, goal_w4=0.04)
    monkeypatch.setattr(accuracy, "model_of", lambda name: model)
    monkeypatch.setattr(accuracy, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(accuracy, "GREEDY", 2)
    result: dict[str, Any] = {"models": {}}

    def commits(commit: str, *caches: str, again: bool = False) -> dict[str, str]:
        monkeypatch.setenv("SLIPSTREAM_COMMIT", commit)
        asked = {"rows": ["int8"], "caches": caches, "pieces": 2, "samples": 1, "device": "cpu"}
        args = argparse.Namespace(**asked, questions=0, question_rows=[], again=again)
        accuracy.run("tiny", args, result)
        assert json.loads((tmp_path / "result.json").read_text()) == result
        (row,) = result["models"]["tiny"]["rows"].values()
        return {cache: each["commit"] for cache, each in row["caches"].items()}

    assert commits("first", "auto") == {"auto": "first"}
    assert commits("second", "auto", "int8") == {"auto": "first", "int8": "second"}
    assert commits("third", "auto", "int8") == {"auto": "first", "int8": "second"}
    assert commits("fourth", "auto", again=True) == {"auto": "fourth"}


def test_goals(bench: SimpleNamespace) -> None:
    cost = {"int8": 0.001, "fp8": 0.0031, "int4-plain": 0.07, "awq-gptq": 0.036}
    rows = {row: {"caches": {"auto": {"more": more}}} for row, more in cost.items()}
    model = {"rows": rows, "goal_w4": 0.04}
    assert bench.accuracy_table.missed({"models": {"tiny": model}}) == [
        "tiny: fp8 costs +0.31%, the goal is +0.30%",
        "tiny: awq-gptq, half of plain rounding costs +3.60%, the goal is +3.50%",
    ]
    model["goal_w4"], cost = 0.02, rows["int4-plain"]["caches"]["auto"]
    cost["more"] = 0.08
    lines = bench.accuracy_table.missed({"models": {"tiny": model}})
    assert lines[1:] == ["tiny: awq-gptq costs +3.60%, the goal is +2.00%"]
