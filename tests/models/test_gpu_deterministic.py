"""Deterministic mode on a GPU: the same bits alone and in a crowd, in graphs and without."""

from pathlib import Path

import pytest
import torch
from models.checkpoints import Asker, make_model, make_runner, random_prompts, save
from slipstream.engine.runner import ModelRunner
from slipstream.engine.scheduler import Limits
from slipstream_contract.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
NUM_REQUESTS, NUM_OUTPUTS = 40, 10


def answers(runner: ModelRunner, together: int, budget: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probs of every request, so many of them at once."""
    asker = Asker(runner, Limits(together, budget, 1000))
    lengths = [1 + 37 * i % 300 for i in range(NUM_REQUESTS)]
    for i, prompt in enumerate(random_prompts(lengths)):
        asker.submit(
            prompt,
            SamplingParams(
                max_tokens=NUM_OUTPUTS,
                temperature=[0.0, 1.0, 0.7][i % 3],
                top_p=[1.0, 1.0, 0.9][i % 3],
                repetition_penalty=[1.0, 1.1][i % 2],
                seed=i,
                log_probs=True,
            ),
        )
    asker.drain()
    return [(answer.token_ids, answer.log_probs) for answer in asker.answers.values()]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16", "quantization": "fp8"}),
    ],
    ids=str,
)
def test_alone_and_batched(tmp_path: Path, family: str, options: dict[str, object]) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    runner = make_runner(
        save(make_model(family, max_position_embeddings=512, **sizes), tmp_path),
        device="cuda",
        kv_cache_tokens=NUM_REQUESTS * 352,
        block_size=16,
        max_num_seqs=NUM_REQUESTS,
        deterministic=True,
        **options,
    )
    alone = answers(runner, 1, 2048)
    for together, budget in [(NUM_REQUESTS, 2048), (7, 64), (30, 400)]:
        crowd = answers(runner, together, budget)
        different = [i for i in range(NUM_REQUESTS) if alone[i] != crowd[i]]
        assert not different, f"{together} at once, {budget} tokens a step: {different}"
