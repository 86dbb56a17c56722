"""Deterministic mode: a row's bits do not depend on its neighbours, its chunks or its place."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures.models.checkpoints import (
    Asker,
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from slipstream.engine.scheduler import Limits
from slipstream.fuse.slices import SlicedNormLinear
from slipstream.layers.sliced import ROWS
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

NUM_PAIRS = 4_000
STYLES = [
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, top_k=50),
]


def make(directory: Path, family: str = "llama", **options: object) -> ModelRunner:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 203}
    checkpoint = save(make_model(family, num_hidden_layers=1, **sizes), directory)
    return make_runner(checkpoint, deterministic=True, **options)


def generations(count: int, num_outputs: int) -> list[Generation]:
    rng = random.Random(count)
    prompts = random_prompts([rng.randint(1, 24) for _ in range(count)], 203)
    return [
        Generation(prompt, num_outputs, STYLES[i % len(STYLES)], seed=i)
        for i, prompt in enumerate(prompts)
    ]


def outputs(ours: list[Generation]) -> list[tuple[list[int], list[float]]]:
    return [(g.outputs, g.log_probs) for g in ours]


@pytest.mark.rest
def test_thousands_of_pairs_alone_and_batched(tmp_path: Path) -> None:
    """A pair is a token drawn alone and the same drawn in a crowd, its log prob bit for bit."""
    runner = make(tmp_path, max_num_seqs=100)
    num_outputs, rng = 25, random.Random(1)
    count = NUM_PAIRS // num_outputs
    alone, batched = generations(count, num_outputs), generations(count, num_outputs)
    for generation in alone:
        Driver(runner).finish([generation])
    driver, waiting, running = Driver(runner, seed=3), list(batched), []
    while waiting or running:
        running = [g for g in running if not g.is_finished]
        while waiting and len(running) < 90:
            running.append(waiting.pop())
        rng.shuffle(running)
        if running:
            driver.step(running, rng.choice([1, 5, 16, 300]))
        for g in running:
            if g.is_finished:
                driver.free.extend(g.blocks())
    assert sum(len(g.outputs) for g in batched) == NUM_PAIRS
    assert outputs(alone) == outputs(batched)


@pytest.mark.parametrize(("family", "options"), [("qwen3", {}), ("llama", {"dtype": "bfloat16"})])
@pytest.mark.rest
def test_other_models(tmp_path: Path, family: str, options: dict[str, object]) -> None:
    runner = make(tmp_path, family, **options)
    alone, batched = generations(30, 6), generations(30, 6)
    for generation in alone:
        Driver(runner).finish([generation])
    Driver(runner, seed=3).finish(batched, chunk=7)
    assert outputs(alone) == outputs(batched)


def test_through_the_engine_with_preemptions(tmp_path: Path) -> None:
    runner = make(tmp_path, kv_cache_tokens=300)
    asked = [
        SamplingParams(max_tokens=20 + i, seed=i, repetition_penalty=1.1, log_probs=True)
        for i in range(12)
    ]
    prompts = random_prompts([5 + 3 * i for i in range(12)], 203)

    def run(numbers: list[int], limits: Limits) -> Asker:
        asker = Asker(runner, limits)
        for i in numbers:
            asker.submit(prompts[i], asked[i])
        asker.drain()
        return asker

    crowd = run(list(range(12)), Limits(12, 40))
    assert crowd.engine.status().num_preemptions > 0
    for i in range(12):
        alone = run([i], Limits(12, 2048)).answers[0, 0]
        assert alone.token_ids == crowd.answers[i, 0].token_ids
        assert alone.log_probs == crowd.answers[i, 0].log_probs


WITHOUT = SimpleNamespace(rows=SimpleNamespace(positions=None))  # no table of positions reads it


def test_only_where_it_is_asked_for(tmp_path: Path) -> None:
    runner = make(tmp_path)
    assert isinstance(runner._model.blocks[0].attention.qkv.without_terms, SlicedNormLinear)
    plain = make_runner(tmp_path)
    assert not isinstance(plain._model.blocks[0].attention.qkv.without_terms, SlicedNormLinear)
    generation, other = generations(2, 8)[1], generations(2, 8)[1]
    Driver(runner).finish([generation])
    Driver(plain).finish([other])
    assert generation.outputs == other.outputs
    with pytest.raises(AssertionError, match="multiple"):
        runner._model(torch.zeros(ROWS + 1, dtype=torch.int64), [WITHOUT], runner._caches)
