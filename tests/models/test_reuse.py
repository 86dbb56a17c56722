"""Reuse on the default model: the same bits with it and without it."""

import random
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Asker, make_runner
from slipstream.engine.scheduler import Limits
from slipstream_contract.sampling import SamplingParams

CHECKPOINT = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/checkpoint"
NUM_TURNS = 2
slow_int8 = pytest.param("int8", marks=pytest.mark.slow)
rest_fp8 = pytest.param("fp8", marks=pytest.mark.rest)


@pytest.mark.parametrize("dtype", ["auto", rest_fp8, "int4", slow_int8])
def test_conversations_have_the_same_bits_with_reuse_and_without(dtype: str) -> None:
    """Turns of conversations that share a beginning, with a cache too small for all of them."""
    sizes = (
        {"kv_cache_tokens": 96} if dtype == "auto" else {"kv_cache_tokens": 160, "block_size": 16}
    )
    runner = make_runner(
        CHECKPOINT, deterministic=True, max_num_seqs=8, kv_cache_dtype=dtype, **sizes
    )
    system = list(range(300, 321))

    def run(limits: Limits) -> tuple[list[tuple[list[int], list[float]]], Asker]:
        rng, asker = random.Random(2), Asker(runner, limits)
        with torch.inference_mode():
            for cache in runner._caches:
                cache.view(torch.uint8).fill_(
                    255
                )  # NaN: whoever reads what was not written gets it
        histories = [[*system, *(rng.randrange(1000) for _ in range(i))] for i in range(4)]
        for turn in range(NUM_TURNS):
            numbers = []
            for i, history in enumerate(histories):
                sampling = SamplingParams(
                    max_tokens=3 + i,
                    seed=10 * turn + i,
                    temperature=float(i % 2),
                    log_probs=True,
                    n=1 + (i == 3),
                )
                numbers.append(asker.submit(history, sampling))
            asker.drain()
            for i, number in enumerate(numbers):
                question = [rng.randrange(1000) for _ in range(rng.randint(1, 5))]
                histories[i] = [*histories[i], *asker.answers[number, 0].token_ids, *question]
        return [(a.token_ids, a.log_probs) for a in asker.answers.values()], asker

    wanted, plain = run(Limits(8, 2048, kv_cache_reuse=False))
    assert plain.engine.figures().counters["prefix_hits"] == 0
    answers, asker = run(Limits(8, 19))
    assert answers == wanted
    counters = asker.engine.figures().counters
    assert counters["prefix_hits"] > 0.5 * counters["prefix_queries"]
    assert counters["evicted_blocks:usual"] > 0
