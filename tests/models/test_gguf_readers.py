"""GGUF files as transformers' own reader has them: a second reading, which is not ours.

`AutoModelForCausalLM.from_pretrained(gguf_file=...)` dequantises what it reads; logits of the model
that it makes are those of the engine on the same file. It reads no size of a head nor a window, so
these are its defaults; of other architectures it has other sizes than files that are this small.
"""

from pathlib import Path

import pytest
import torch
import transformers
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    sizes_of,
)
from fixtures.models.gguf_files import SIZES, unpacked, write_gguf
from fixtures.tiers import quick_of

CASES = {
    "llama": ("llama", "Q8_0", {}),
    "llama, Q4_K": ("llama", "Q4_K", {}),
    "llama, Q6_K": ("llama", "Q6_K", {}),
    "qwen2": ("qwen2", "Q4_0", {}),
    "qwen3": ("qwen3", "Q5_1", {"head_dim": 128}),
    "starcoder2": ("starcoder2", "F32", {}),
    "stablelm": ("stablelm", "F32", {}),
    "bloom": ("bloom", "F32", {}),
    "gemma2": ("gemma2", "F32", {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "gemma3": ("gemma3", "F32", {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "qwen3_moe": ("qwen3_moe", "F32", {"head_dim": 128, "moe_intermediate_size": 768}),
}


@pytest.mark.parametrize("name", quick_of(CASES, {"llama, Q4_K"}))
def test_both_readers_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It asks for accelerate, which nothing of it uses where all lies on one device.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    family, kind, overrides = CASES[name]
    model = make_model(family, **(sizes_of(family, **SIZES) | overrides))
    path = write_gguf(model, family, tmp_path / "model.gguf", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    runner = make_runner(unpacked(path, tmp_path / "checkpoint"), kv_cache_tokens=512)
    prompts = random_prompts([40, 7], model.config.vocab_size)
    generations = [Generation(prompt, 4) for prompt in prompts]
    Driver(runner, keep_logits=True).finish(generations, chunk=13)
    for generation in generations:
        with torch.no_grad():
            truth = theirs(torch.tensor([generation.tokens])).logits[0]
        for i, logits in enumerate(generation.logits):
            expected = truth[len(generation.prompt) - 1 + i]
            assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max().clamp(min=1)
