"""Drawn damage to checkpoints of every format: refused by name, or the logits are what they were.

Most files are refused; a change that means nothing (a key that no one reads, a scale in a wider
type) serves the same model. No other error, and no other logits.
"""

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_runner, random_prompts
from fixtures.models.spoiled import SPOILS
from fixtures.models.written import COMPRESSED, OPENAI, PACKED, quantised
from fixtures.tiers import quick_of
from slipstream.errors import StartError

# Layouts that differ from those of the others in a reader of the same library.
FEWER = ["awq-gemv-32", "gptq-v1-3-64", "ct-int-rows", "ct-naive-4", "hf-fp8-float", OPENAI]
FORMATS = [*PACKED, *COMPRESSED, *FEWER]
CASES = {f"{name}, {spoil}": (name, spoil) for name in FORMATS for spoil in SPOILS}
QUICK = {"gptq-v1-4-32, contradicted", "compressed int4, misshapen"}
QUICKLY, ALL = 8, 24  # drawn files of a case, of `FEWER` the first


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """Return the untouched directory of a format, and its logits."""

    @cache
    def made(name: str) -> tuple[Path, torch.Tensor]:
        directory = quantised(name, tmp_path_factory.mktemp("whole"))
        return directory, logits(directory)

    return made


def logits(directory: Path) -> torch.Tensor:
    """Return what the engine's runner computes behind a prompt."""
    generation = Generation(random_prompts([20], 250)[0], 1)
    runner = make_runner(directory, kv_cache_tokens=64)
    Driver(runner, keep_logits=True).finish([generation])
    return generation.logits[0]


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
def test_a_spoiled_file_is_refused_or_means_the_same(
    case: str, whole: Callable[[str], tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    name, spoil = CASES[case]
    directory, wanted = whole(name)
    draw = random.Random(case)
    num_refused, wrong = 0, []
    count = QUICKLY if case in QUICK or name in FEWER else ALL
    for _ in range(count):
        shutil.rmtree(tmp_path / "spoiled", ignore_errors=True)
        shutil.copytree(directory, tmp_path / "spoiled")
        said = SPOILS[spoil](tmp_path / "spoiled", draw)
        try:
            found = logits(tmp_path / "spoiled")
        except StartError as error:
            num_refused += 1
            if str(tmp_path / "spoiled") not in str(error) or "\n" in str(error):
                wrong.append(f"{said}: {error}")
            continue
        except Exception as error:
            wrong.append(f"{said}: {type(error).__name__}: {error}")
            continue
        if not (found - wanted).abs().max() <= 1e-4 * wanted.abs().max():
            wrong.append(f"{said}: other logits")
    assert not wrong, "\n".join(wrong)
    assert num_refused > count // 4
