"""GGUF files on a GPU: tokens are those of the same weights from safetensors, to the last bit."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.gguf_files import SIZES, unpacked, write_gguf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q4_0"), ("qwen3", "Q8_0"), ("gemma3", "Q4_1"), ("llama", "F16")],
)
def test_tokens_are_those_of_the_same_weights(family: str, kind: str, tmp_path: Path) -> None:
    base = SIZES | ({"query_pre_attn_scalar": 64} if family == "gemma3" else {})
    model = make_model(family, **base)
    path = write_gguf(model, family, tmp_path / "model.gguf", kind)  # the model gets its values
    outputs = []
    for directory in (unpacked(path, tmp_path / "gguf"), save(model, tmp_path / "safetensors")):
        options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
        driver = Driver(make_runner(directory, **options))
        prompts = random_prompts([40, 7, 100], model.config.vocab_size)
        generations = [Generation(prompt, 24) for prompt in prompts]
        driver.finish(generations, 64)
        outputs.append([generation.tokens for generation in generations])
    assert outputs[0] == outputs[1]
