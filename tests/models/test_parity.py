"""Logits within 1e-4 of transformers', equal greedy tokens: a grid of shapes, fp32, on the CPU."""

from pathlib import Path

import pytest
import torch
import transformers
from fixtures.models.checkpoints import (
    LLAMA3,
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.parity import GEMMA, GRID, QUICK, check_against
from fixtures.tiers import quick_of

GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize("name", quick_of(GRID, QUICK))
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    family, overrides = GRID[name]
    model = make_model(family, **overrides)
    runner = make_runner(save(model, tmp_path))
    prompts = random_prompts([37, 1, 90, 8, 16], model.config.vocab_size)
    generations = [Generation(prompt, 6 + i) for i, prompt in enumerate(prompts)]
    driver = Driver(runner, keep_logits=True)
    driver.step(generations[:1], 7)  # so that prefill chunks of others meet running decodes
    driver.finish(generations, chunk=13)
    for generation in generations:
        check_against(model, generation, 1e-4)


def test_prefill_in_chunks_of_every_size(tmp_path: Path) -> None:
    model = make_model("llama", num_attention_heads=2, hidden_size=64)
    driver = Driver(make_runner(save(model, tmp_path)), keep_logits=True)
    (prompt,) = random_prompts([41])
    for chunk in range(1, len(prompt) + 1):
        generation = Generation(prompt, 3)
        driver.finish([generation], chunk)
        check_against(model, generation, 1e-4)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_every_block_size(block_size: int, tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64)
    driver = Driver(make_runner(save(model, tmp_path), block_size=block_size), keep_logits=True)
    generations = [Generation(p, 4) for p in random_prompts([min(block_size - 1, 200), 9, 130])]
    driver.finish(generations, 50)
    for generation in generations:
        check_against(model, generation, 1e-4)


def test_long_context_of_the_whole_table(tmp_path: Path) -> None:
    model = make_model("llama", max_position_embeddings=1024, rope_parameters=LLAMA3)
    driver = Driver(make_runner(save(model, tmp_path)), keep_logits=True)
    generation = Generation(random_prompts([1020])[0], 4)  # the last input is position 1,022
    driver.finish([generation], 300)
    check_against(model, generation, 1e-4)


def test_keys_that_change_nothing(tmp_path: Path) -> None:
    """Logits of the file as transformers reads it, with keys of other uses and of other models."""
    save(make_model("llama", hidden_size=64), tmp_path)
    keys = "unk_token_id cls_token_id mask_token_id max_sequence_length model_max_length num_labels"
    edit_config(
        tmp_path,
        **dict.fromkeys(keys.split(), 3),
        classifier_dropout=0.1,
        use_flash_attention=True,
        logit_scale=0.5,
        final_logit_softcapping=1.0,
        query_pre_attn_scalar=7,
        auto_map={"AutoModelForCausalLM": "elsewhere.Model"},
    )
    driver = Driver(make_runner(tmp_path), keep_logits=True)
    generation = Generation(random_prompts([20])[0], 3)
    driver.finish([generation])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    check_against(model.eval(), generation, 1e-4)


@pytest.mark.parametrize(("family", "overrides"), [("gemma3", GEMMA), GRID["mistral"]])
def test_bfloat16(family: str, overrides: dict[str, object], tmp_path: Path) -> None:
    """Logits are as far from fp32 as transformers' own bfloat16, within a factor."""
    model = make_model(family, **overrides).bfloat16()
    (prompt,) = random_prompts([60])
    runner = make_runner(save(model, tmp_path), dtype="bfloat16")
    driver, generation = Driver(runner, keep_logits=True), Generation(prompt, 1)
    driver.finish([generation], 17)
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        theirs = model(tokens).logits[0, -1].float()
        exact = model.float()(tokens).logits[0, -1]
    error, allowed = ((x - exact).pow(2).mean().sqrt() for x in (generation.logits[0], theirs))
    assert error <= 2 * allowed
