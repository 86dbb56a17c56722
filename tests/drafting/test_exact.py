"""The default model with and without drafts, in deterministic mode: not one token differs.

The quick tier sends a few requests. All 10,000, of random parameters, is one command:

    SLIPSTREAM_EXACT=10000 .venv/bin/python -m pytest tests/drafting/test_exact.py --tier rest
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.engine.client import Client
from fixtures.engine.eager import Eager
from msgspec.structs import replace
from slipstream.config import EngineConfig
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import FinishReason
from slipstream_contract.drafts import Drafts
from slipstream_contract.sampling import SamplingParams

CHECKPOINT = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/checkpoint"
VOCAB_SIZE = 4096


def runner_of(num_tokens: int, speculation: str = "lookup") -> ModelRunner:
    config = EngineConfig(
        checkpoint=str(CHECKPOINT),
        device="cpu",
        deterministic=True,
        speculation=speculation,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=192,
        kv_cache_tokens=num_tokens,
    )
    return ModelRunner(resolve(config))


def asked(rng: random.Random) -> tuple[list[int], SamplingParams]:
    part = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 8))]
    prompt = part * rng.randint(1, 5)
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 40),
        min_tokens=rng.choice([0, 5]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        top_k=rng.choice([0, 0, 5, 50]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(2**32),
        n=rng.choice([1, 1, 2]),
        end_ids=(rng.randrange(VOCAB_SIZE),),
        stop_token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 40]))),
        bad_words=tuple(
            tuple(rng.choices(part, k=rng.randint(1, 2))) for _ in range(rng.choice([0, 1]))
        ),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
        log_probs=True,
    )
    return prompt, sampling


def outputs(
    runner: ModelRunner,
    speculator: Speculator | None,
    seed: int,
    count: int,
    drafts: Sequence[Drafts] = (),
) -> tuple[list[tuple[tuple[int, int], list[int], list[float], FinishReason]], float]:
    """Return tokens, log probs and endings of all requests, and how many drafts were right.

    `drafts` are those that the requests bring or ask for, if any do.
    """
    rng, limits = random.Random(seed), Limits(8, 128, max_num_rows=64)
    client = Client(Engine(limits, runner, None, speculation=speculator))
    for number in range(count):
        prompt, sampling = asked(rng)
        own = drafts[number] if drafts else None
        client.submit(prompt, replace(sampling, drafts=own))
        while client.engine._scheduler.num_waiting > 4:
            client.step()
    client.drain()
    found = [
        (key, stream.token_ids, stream.log_probs, stream.reason)
        for key, stream in sorted(client.streams.items())
    ]
    return found, client.engine._scheduler.draft_counts.total("accepted_tokens")


def compare(count: int, seed: int) -> float:
    """Return how many drafts were right."""
    runner = runner_of(768)  # too few for 8 sequences of 192
    with_drafts, num_right = outputs(runner, Eager(PromptLookup(), 6), seed, count)
    assert with_drafts == outputs(runner, None, seed, count)[0]
    return num_right


def compare_asked(count: int, seed: int) -> None:
    """Compare with requests that bring drafts, right for a while, or ask for some."""
    runner, rng = runner_of(768, "none"), random.Random(seed)
    plain, _ = outputs(runner, None, seed, count)
    drafts = []
    for number in range(count):
        token_ids = next(ids for (request, _), ids, *_ in plain if request == number)
        right = token_ids[: rng.randint(0, 50)]
        others = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 3]))]
        most = rng.choice([None, None, 1, 8])
        drafts.append(Drafts(token_ids=(*right, *others), most=most))
    with_drafts, num_right = outputs(runner, None, seed, count, drafts)
    assert with_drafts == plain
    assert num_right > 0


def test_a_few_requests() -> None:
    assert compare(6, 1) > 0
    compare_asked(6, 1)


@pytest.mark.rest
def test_many_requests() -> None:
    count = int(os.environ.get("SLIPSTREAM_EXACT", "200"))
    for seed in range(2, 2 + -(-count // 200)):
        assert compare(min(200, count), seed) > 0
        compare_asked(min(200, count), seed)
