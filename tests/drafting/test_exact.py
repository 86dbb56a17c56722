"""The default model with and without drafts, in deterministic mode: not one token differs.

The quick tier sends a few requests. All 10,000, of random parameters, is one command:

    SLIPSTREAM_EXACT=10000 .venv/bin/python -m pytest tests/drafting/test_exact.py --tier rest
"""

import os
import random
from pathlib import Path

import pytest
from fixtures.engine.client import Client
from slipstream.config import EngineConfig
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.sampling import SamplingParams

CHECKPOINT = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/checkpoint"
VOCAB_SIZE = 4096


class _Eager(Speculator):
    """Verifies whatever is proposed, whether it pays or not."""

    def _look(self, sequence):  # type: ignore[no-untyped-def]
        drafts, _ = super()._look(sequence)
        sequence.is_speculating = bool(drafts)
        return drafts, [1.0] * len(drafts)

    def _choose(self, num_rows, found, max_drafts):  # type: ignore[no-untyped-def]
        counts = []
        for survival in found:
            counts.append(min(len(survival), max_drafts - sum(counts)))
        return counts


def runner_of(num_tokens: int) -> ModelRunner:
    config = EngineConfig(
        checkpoint=str(CHECKPOINT),
        device="cpu",
        deterministic=True,
        speculation="lookup",
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
    runner: ModelRunner, speculator: Speculator | None, seed: int, count: int
) -> tuple[list[object], float]:
    """Return tokens, log probs and endings of all requests, and how many drafts were right."""
    rng, limits = random.Random(seed), Limits(8, 128, max_num_rows=64)
    client = Client(Engine(limits, runner, None, speculation=speculator))
    for _ in range(count):
        client.submit(*asked(rng))
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
    with_drafts, num_right = outputs(runner, _Eager(PromptLookup(), 6), seed, count)
    assert with_drafts == outputs(runner, None, seed, count)[0]
    return num_right


def test_a_few_requests() -> None:
    assert compare(6, 1) > 0


@pytest.mark.rest
def test_many_requests() -> None:
    count = int(os.environ.get("SLIPSTREAM_EXACT", "200"))
    for seed in range(2, 2 + -(-count // 200)):
        assert compare(min(200, count), seed) > 0
