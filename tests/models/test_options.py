"""Pairs of features, and prefixes that are reused, with families whose options are drawn."""

import itertools
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_runner, random_prompts, save
from fixtures.models.options import OPTIONS, drawn_model
from fixtures.models.parity import engine_greedy
from slipstream.engine.scheduler import Limits
from slipstream.models.padding import with_heads_of

PADDED = "padded heads"
# What a configuration asks for, and how far logits may be from those without, by their deviation.
FEATURES: dict[str, tuple[dict[str, object], float]] = {
    "int8 cache": ({"kv_cache_dtype": "int8"}, 0.05),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, 0.2),
    "int4 cache": ({"kv_cache_dtype": "int4"}, 0.6),
    "fp8 weights": ({"quantization": "fp8"}, 0.2),
    "int8 weights": ({"quantization": "int8"}, 0.05),
    "int4 weights": ({"quantization": "int4"}, 0.6),
    "deterministic": ({"deterministic": True}, 1e-4),
    "padded heads": ({}, 1e-4),
}
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if len({key for name in pair for key in FEATURES[name][0]}) == len(pair) - pair.count(PADDED)
]
PAIRED = {
    f"{family}, {', '.join(PAIRS[i % len(PAIRS)])}": (family, PAIRS[i % len(PAIRS)])
    for i, family in enumerate(OPTIONS)
}


@pytest.mark.rest
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_features(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family with a pair; over all of them every pair is there."""
    assert len(PAIRED) >= len(PAIRS)
    family, pair = PAIRED[name]
    save(drawn_model(family, 1), tmp_path)

    def logits(**options: object) -> torch.Tensor:
        generations = [Generation(prompt, 2) for prompt in random_prompts([29, 20], 211)]
        runner = make_runner(tmp_path, block_size=16, kv_cache_tokens=512, **options)
        Driver(runner, keep_logits=True).finish(generations, chunk=11)
        return torch.stack([logits for each in generations for logits in each.logits[:1]])

    plain = logits()
    options = {key: value for each in pair for key, value in FEATURES[each][0].items()}
    if PADDED in pair:
        sizes = lambda device, model: with_heads_of(model, (48,))  # noqa: E731
        monkeypatch.setattr("slipstream.runner.plan.model_on", sizes)
    most = sum(FEATURES[each][1] for each in pair)
    assert (logits(**options) - plain).pow(2).mean().sqrt() <= most * plain.std()


@pytest.mark.rest
@pytest.mark.parametrize("family", OPTIONS)
def test_a_prefix_that_is_reused(family: str, tmp_path: Path) -> None:
    """Tokens of prompts with a common start are those of an engine that keeps nothing."""
    save(drawn_model(family, 1), tmp_path)
    first, *others = random_prompts([40, 3, 5], 211)
    prompts = [first + each for each in others]
    found = []
    for reuses in (True, False):
        runner = make_runner(tmp_path, kv_cache_tokens=512, kv_cache_reuse=reuses)
        found.append(engine_greedy(runner, Limits(1, 64), prompts))
    assert found[0] == found[1]
