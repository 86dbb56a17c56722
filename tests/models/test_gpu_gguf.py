"""GGUF files on a GPU: tokens of unpacked weights are those of safetensors, to the last bit; codes
that stay packed give their logits, within the rounding of 16 bits.
"""

from pathlib import Path

import pytest
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.gguf_files import SIZES, unpacked, write_gguf

pytestmark = pytest.mark.gpu


KINDS = [("llama", "Q4_0"), ("qwen3", "Q8_0"), ("gemma3", "Q4_1"), ("llama", "F16")]
PACKED = [*KINDS[:3], ("llama", "Q4_K"), ("qwen3", "Q6_K")]


def both(family: str, kind: str, tmp_path: Path) -> tuple[Path, Path]:
    """Directories with the same weights: blocks of `kind`, and numbers of 32 bits."""
    base = SIZES | ({"query_pre_attn_scalar": 64} if family == "gemma3" else {})
    model = make_model(family, **base)
    path = write_gguf(model, family, tmp_path / "model.gguf", kind)  # the model gets its values
    return unpacked(path, tmp_path / "gguf"), save(model, tmp_path / "safetensors")


def generated(directory: Path, **options: object) -> list[Generation]:
    """Three prompts, greedily continued in bfloat16, with their logits."""
    runner = make_runner(directory, device="cuda", dtype="bfloat16", deterministic=True, **options)
    driver = Driver(runner, keep_logits=True)
    prompts = random_prompts([40, 7, 100], SIZES["vocab_size"])
    generations = [Generation(prompt, 24) for prompt in prompts]
    driver.finish(generations, 64)
    return generations


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_tokens_are_those_of_the_same_weights(family: str, kind: str, tmp_path: Path) -> None:
    blocks, plain = both(family, kind, tmp_path)
    ours, theirs = generated(blocks, quantization="none"), generated(plain)
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]


@pytest.mark.parametrize(("family", "kind"), PACKED)
def test_packed_codes_give_their_logits(family: str, kind: str, tmp_path: Path) -> None:
    for ours, theirs in zip(*map(generated, both(family, kind, tmp_path)), strict=True):
        expected = theirs.logits[0].float()
        assert (ours.logits[0].float() - expected).abs().max() <= 0.03 * expected.abs().max()
