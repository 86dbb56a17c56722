"""GGUF files of every family and of every type of blocks: logits are transformers'."""

import logging
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    LLAMA3,
    YARN,
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
)
from fixtures.models.gguf_files import SIZES, unpacked, write_gguf
from fixtures.tiers import quick_of
from slipstream.kernels.cpu.native import library
from slipstream.models.gguf.types import BLOCK_TYPES

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
CASES = {
    "llama": ("llama", {}, {}),
    "llama, biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {},
    ),
    "llama, factors of each frequency": ("llama", {"rope_parameters": LLAMA3}, {}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}, {}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}, {}),
    "llama, a number for each layer": (
        "llama",
        {},
        {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]},
    ),
    "mistral, a window": ("mistral", {"sliding_window": 24}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "sliding_window": 16}, {}),
    "gemma3, a window by layers": (
        "gemma3",
        {
            "num_hidden_layers": 2,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {"attention.sliding_window_pattern": [False, True]},
    ),
}
TYPES = [kind.name for kind in BLOCK_TYPES.values()]


def check(model: torch.nn.Module, directory: Path) -> None:
    driver = Driver(make_runner(directory), keep_logits=True)
    generation = Generation(random_prompts([40], model.config.vocab_size)[0], 4)
    driver.finish([generation], 13)
    with torch.no_grad():
        truth = model(torch.tensor([generation.tokens])).logits[0]
    for i, logits in enumerate(generation.logits):
        expected = truth[len(generation.prompt) - 1 + i]
        assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", CASES)
def test_families(name: str, tmp_path: Path) -> None:
    family, overrides, keys = CASES[name]
    base = SIZES | ({"query_pre_attn_scalar": 64} if family == "gemma3" else {})
    model = make_model(family, **(base | overrides))
    path = write_gguf(model, family, tmp_path / "model.gguf", **keys)
    check(model, unpacked(path, tmp_path / "checkpoint"))


@pytest.mark.parametrize("kind", quick_of(TYPES, {"BF16", "Q4_1", "Q3_K", "Q6_K"}))
def test_types(kind: str, tmp_path: Path) -> None:
    model = make_model("llama", **SIZES)
    path = write_gguf(model, "llama", tmp_path / "model.gguf", kind)
    check(model, unpacked(path, tmp_path / "checkpoint"))


def test_types_that_differ_within_a_gemm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in files named Q4_K_M."""
    model, others = make_model("llama", **SIZES), {"v_proj": "Q6_K", "up_proj": "Q5_1"}
    path = write_gguf(model, "llama", tmp_path / "model.gguf", "Q4_K", others=others)
    with caplog.at_level(logging.INFO):
        check(model, unpacked(path, tmp_path / "checkpoint"))
    if library() is not None:
        said = "multiplied as they are by the CPU kernels"
        assert f"weights of 8 bits by 16 inputs with minimums: {said} (2)" in caplog.text
        assert f"weights of 4 bits by 32 inputs with zeros with minimums: {said} (4)" in caplog.text
