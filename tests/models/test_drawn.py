"""Configurations of every family that are drawn, against transformers, or against plain fp64 code.

Each draws its options anew: sizes, heads, biases, windows, rotation, experts, tied ends. The seed
is in the name of the test, what was drawn in its log. Prompts are computed in chunks that cross
borders of blocks, beside decodes; a sequence is preempted and computed again.
"""

import json
import logging
import random
from pathlib import Path

import pytest
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drawn_later import DRAWN, drawn
from fixtures.models.options import OPTIONS
from fixtures.models.parity import GRID, QUICK, check_against
from fixtures.models.remote_drawn import REMOTE
from fixtures.models.two_way import FAMILY as TWO_WAY
from slipstream.models.registry import family_of, supported

SEEDS = range(6)
FAMILIES = tuple(dict.fromkeys((*DRAWN, *OPTIONS, *REMOTE)))
ALONE = {*FAMILIES} - {GRID[name][0] for name in QUICK}  # that test_parity.py lacks in quick
CASES = [
    pytest.param(family, seed, marks=[] if seed == 0 and family in ALONE else [pytest.mark.rest])
    for family in FAMILIES
    for seed in SEEDS
]
_log = logging.getLogger(__name__)


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_a_drawn_configuration(family: str, seed: int, tmp_path: Path) -> None:
    """Logits within 1e-4 and the same tokens, over chunks, borders of blocks and preemption."""
    rng = random.Random(f"{family} {seed}")
    is_remote = family in REMOTE and (family not in OPTIONS or seed % 2 == 1)
    model = REMOTE[family](rng) if is_remote else drawn(family, rng)
    if is_remote:
        model.save(tmp_path)
    else:
        save(model, tmp_path)
    options = json.loads((tmp_path / "config.json").read_text())
    _log.warning("%s, seed %d: %s", family, seed, options)
    driver = Driver(make_runner(tmp_path, block_size=rng.choice([8, 16, 32])), keep_logits=True)
    lengths = [rng.randrange(1, 57) for _ in range(3)]
    prompts = random_prompts(lengths, model.config.vocab_size, seed)
    generations = [Generation(prompt, 4 + i) for i, prompt in enumerate(prompts)]
    driver.step(generations[:1], rng.randrange(1, 20))
    driver.step(generations, rng.randrange(1, 20))
    driver.preempt(generations[0])
    driver.finish(generations, rng.randrange(3, 20))
    for generation in generations:
        check_against(model, generation, 1e-4)


def test_all_families_are_drawn() -> None:
    # Prompts that are computed whole are those of test_two_way.py.
    assert {*DRAWN, *OPTIONS, *REMOTE, TWO_WAY} == {family_of(name).name for name in supported()}
