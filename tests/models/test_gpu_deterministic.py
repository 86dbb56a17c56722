"""Deterministic mode on a GPU: the same bits alone and in a crowd, in graphs and without."""

from pathlib import Path

import pytest
from fixtures.models.checkpoints import Asker, make_model, make_runner, random_prompts, save
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu
NUM_REQUESTS, NUM_OUTPUTS = 40, 10
LENGTHS = [1 + 37 * i % 300 for i in range(NUM_REQUESTS)]  # of prompts
LONG = [3000, 1400, 7, 2111]


def answers(
    runner: ModelRunner, together: int, budget: int, lengths: list[int]
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probs of every request, so many of them at once."""
    asker = Asker(runner, Limits(together, budget, 1000))
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
        ("llama", {"dtype": "float16", "quantization": "w8a8"}),
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
    alone = answers(runner, 1, 2048, LENGTHS)
    for together, budget in [(NUM_REQUESTS, 2048), (7, 64), (30, 400)]:
        crowd = answers(runner, together, budget, LENGTHS)
        different = [i for i in range(NUM_REQUESTS) if alone[i] != crowd[i]]
        assert not different, f"{together} at once, {budget} tokens a step: {different}"


def test_long_prompts_in_any_chunks(tmp_path: Path) -> None:
    """Chunks behind many tokens, which otherwise are attended to in parts."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    runner = make_runner(
        save(make_model("llama", max_position_embeddings=4096, **sizes), tmp_path),
        device="cuda",
        kv_cache_tokens=8192,
        block_size=16,
        max_num_seqs=len(LONG),
        dtype="bfloat16",
        deterministic=True,
    )
    alone = answers(runner, 1, 2048, LONG)
    for together, budget in [(1, 64), (len(LONG), 64), (2, 300)]:
        crowd = answers(runner, together, budget, LONG)
        different = [i for i in range(len(LONG)) if alone[i] != crowd[i]]
        assert not different, f"{together} at once, {budget} tokens a step: {different}"
