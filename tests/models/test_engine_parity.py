"""Through the engine itself: what `generate` of transformers gives, the engine gives, batched."""

from pathlib import Path

import pytest
import torch
from models.checkpoints import make_model, make_runner, random_prompts, save
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

LENGTHS = [1, 40, 7, 100, 23, 64, 5, 33]
NUM_OUTPUTS = 12


def engine_greedy(runner: ModelRunner, limits: Limits, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, submitted at once."""
    engine = Engine(limits, runner, None)
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0)
    for i, prompt in enumerate(prompts):
        engine.submit(b"bridge", Submit(i, pack(prompt), sampling, 0))
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for tokens in engine.step().get(b"bridge", []):
            outputs[tokens.request] += tokens.token_ids
        engine.check_integrity()
    return outputs


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
