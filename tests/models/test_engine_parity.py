"""Through the engine itself: what `generate` of transformers gives, the engine gives, batched."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import make_model, make_runner, random_prompts, save
from fixtures.models.parity import LENGTHS, NUM_OUTPUTS, engine_greedy
from slipstream.engine.scheduler import Limits


def oracle_greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """`generate` of transformers, with its own cache."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=NUM_OUTPUTS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return result[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tokens_a_step", [4, 37, 2048])
def test_greedy_tokens_of_generate(family: str, tokens_a_step: int, tmp_path: Path) -> None:
    model = make_model(family)
    # 200 tokens of cache for 373 tokens of work: some are preempted.
    runner = make_runner(save(model, tmp_path), kv_cache_tokens=200)
    prompts = random_prompts(LENGTHS)
    outputs = engine_greedy(runner, Limits(6, tokens_a_step), prompts)
    assert outputs == [oracle_greedy(model, prompt) for prompt in prompts]
