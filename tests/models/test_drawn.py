"""Configurations that are drawn, of families that are Llama but for a few axes, against the oracle.

Each draws its options anew: sizes, heads, biases, windows, rotation, tied ends. The seed is in the
name of the test, what was drawn in its log.
"""

import logging
import random
from pathlib import Path

import pytest
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drawn import DRAWN
from fixtures.models.parity import check_against
from fixtures.models.remote_drawn import REMOTE

SEEDS = range(6)
CASES = [
    pytest.param(family, seed, marks=[] if seed == 0 else [pytest.mark.rest])
    for family in (*DRAWN, *REMOTE)
    for seed in SEEDS
]
_log = logging.getLogger(__name__)


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_a_drawn_configuration(family: str, seed: int, tmp_path: Path) -> None:
    """Logits within 1e-4 and the same tokens, over chunks, borders of blocks and preemption."""
    rng = random.Random(f"{family} {seed}")
    if family in REMOTE:
        model = REMOTE[family](rng)
        options = model.keys
        model.save(tmp_path)
    else:
        options = DRAWN[family](rng)
        model = make_model(family, **options)
        save(model, tmp_path)
    _log.warning("%s, seed %d: %s", family, seed, options)
    driver = Driver(make_runner(tmp_path, block_size=rng.choice([8, 16, 32])), keep_logits=True)
    lengths = [rng.randrange(1, 60) for _ in range(3)]
    prompts = random_prompts(lengths, model.config.vocab_size, seed)
    generations = [Generation(prompt, 4 + i) for i, prompt in enumerate(prompts)]
    driver.step(generations[:1], rng.randrange(1, 20))
    driver.step(generations, rng.randrange(1, 20))
    driver.preempt(generations[0])
    driver.finish(generations, rng.randrange(3, 20))
    for generation in generations:
        check_against(model, generation, 1e-4)
