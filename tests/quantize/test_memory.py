"""Memory of measuring and making: a vocabulary of 262,144 has few logits at once."""

import math
from pathlib import Path

import pytest
import torch
from fixtures.quantize import tiny
from fixtures.quantize.live import Live
from slipstream.layers.residual import Residual
from slipstream_client.cli import main
from slipstream_quantize import measure
from slipstream_quantize.measure import bits_per_byte, logits_of
from slipstream_quantize.opened import Opened, Running
from slipstream_quantize.text import tokenizer_of

VOCABULARY = 262_144
LENGTH = 384
# Its matrices are small, so the embedding, 16 MB in fp32, is nearly all of it.
LARGE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
EMBEDDING = VOCABULARY * 16 * 4
AT_ONCE = 64 << 20  # of logits
MOST = 3 * AT_ONCE + 4 * EMBEDDING  # logits, their logarithms, and a part more


@pytest.mark.rest
def test_bits_of_a_large_vocabulary(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path, **LARGE)
    opened = Opened(directory, "cpu")
    text = torch.arange(LENGTH)[None] * 7 % 256
    with Live() as live:
        bits_per_byte(opened, tokenizer_of(directory), text)
    assert AT_ONCE < live.most <= MOST < VOCABULARY * LENGTH * 4


@pytest.mark.rest
def test_a_large_vocabulary_is_quantised(tmp_path: Path) -> None:
    """The checkpoint is read, calibrated, measured twice and written within the same bytes."""
    directory = tiny.checkpoint(tmp_path / "original", **LARGE)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles of ink stand on the wall.\n" for i in range(30)))
    options = ["--calibration", str(text), "--measure", str(text), "--device", "cpu"]
    where = ["--checkpoint", str(directory), "--output", str(tmp_path / "out")]
    with Live() as live:
        assert main(["quantize", *where, "--scheme", "awq-gptq", *options]) == 0
    assert live.most <= MOST


@pytest.mark.parametrize("at_once", [1, 7, 40])
def test_bits_are_those_of_all_logits(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.checkpoint(tmp_path)
    opened, tokenizer = Opened(directory, "cpu"), tokenizer_of(directory)
    text = torch.arange(80).view(2, 40) * 7 % 256
    monkeypatch.setattr(measure, "LOGIT_BYTES", at_once * 256 * 4)
    bits, count = 0.0, 0
    with torch.inference_mode():
        for ids, sums in Running(opened, text).sums():
            whole = opened.decoder.logits(Residual(sums)).float()
            parts = [logits for _, logits in logits_of(opened, sums)]
            assert max(map(len, parts)) == at_once
            torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
            bits -= float(whole.log_softmax(-1)[range(39), ids[1:]].sum()) / math.log(2)
            count += len(tokenizer.decode(ids[1:].tolist()).encode())
    assert bits_per_byte(opened, tokenizer, text) == pytest.approx(bits / count, rel=1e-5)
