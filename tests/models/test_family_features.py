"""Every family, in every format of the cache: shared prefixes, chunks, windows.

In deterministic mode the bits are those of each request by itself in an empty cache.
What a family has not is refused at start, by a reason of docs/attention.md.
"""

import random
import re
from pathlib import Path

import pytest
from fixtures.models.checkpoints import Answer, Asker, make_runner, random_prompts, save
from fixtures.models.drawn_later import DRAWN, drawn
from fixtures.models.options import OPTIONS
from fixtures.models.remote_drawn import REMOTE
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

FAMILIES = sorted({*DRAWN, *OPTIONS, *REMOTE})
NAMES = ("auto", *FORMATS)
CASES = [  # of a family one format, by turns; the slow tier has all
    pytest.param(family, name, marks=pytest.mark.rest if (i - j) % 4 == 0 else pytest.mark.slow)
    for i, family in enumerate(FAMILIES)
    for j, name in enumerate(NAMES)
]
PAGE = (Path(__file__).parents[2] / "docs" / "attention.md").read_text(encoding="utf-8")
BLOCK = 16
SAMPLING = SamplingParams(max_tokens=5, temperature=0.7, seed=7, log_probs=True)


def checkpoint(family: str, directory: Path) -> int:
    """Write a model that is drawn; return the size of its vocabulary."""
    rng = random.Random(f"features {family}")
    if family in REMOTE:
        model = REMOTE[family](rng)
        model.save(directory)
    else:
        model = drawn(family, rng)
        save(model, directory)
    return int(model.config.vocab_size)


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Four, of which three begin with the same two blocks and a half."""
    shared, *ends = random_prompts([40, 3, 9, 1, 21], vocab_size)
    return [*(shared + end for end in ends[:3]), ends[3]]


def answers(runner: ModelRunner, prompts: list[list[int]], most: int) -> tuple[list[Answer], int]:
    """Return what an engine with an empty cache tells, in steps of so many tokens, and its hits."""
    asker = Asker(runner, Limits(len(prompts), most))
    for prompt in prompts:
        asker.submit(prompt, SAMPLING)
    asker.drain()
    told = [asker.answers[number, 0] for number in range(len(prompts))]
    return told, asker.engine.status().num_prefix_hits


def is_of_the_page(reason: str) -> bool:
    """Return whether docs/attention.md has the reason, whatever numbers a model has."""
    return re.sub(r"\d+", "N", reason) in re.sub(r"\d+", "N", PAGE)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_bits_are_those_of_each_alone(family: str, name: str, tmp_path: Path) -> None:
    prompts = prompts_of(checkpoint(family, tmp_path))
    options = {"deterministic": True, "block_size": BLOCK, "kv_cache_tokens": 7 * BLOCK}
    try:
        runner = make_runner(tmp_path, kv_cache_dtype=name, **options)
    except ConfigError as error:
        refusal = str(error)
    else:
        told, num_hits = answers(runner, prompts, 24)
        assert num_hits > BLOCK
        assert told == [answers(runner, [prompt], 99)[0][0] for prompt in prompts]
        return
    assert name != "auto"
    assert is_of_the_page(refusal), refusal
