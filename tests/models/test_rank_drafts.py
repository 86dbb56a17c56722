"""Drafters with weights beside a model on several ranks; and how many sums its blocks make."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drafters import SpeculatingDriver, save_eagle3, save_medusa
from fixtures.models.parity import engine_greedy
from fixtures.models.ranks import ranks_of
from fixtures.tiers import quick_of
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

SAMPLED = SamplingParams(max_tokens=1, temperature=0.8, top_k=40, top_p=0.9)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
CASES = {
    f"{name}, {size} ranks": (name, size)
    for name in ("draft", "medusa", "eagle3")
    for size in (2, 4)
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", num_hidden_layers=3)
    return save(model, tmp_path_factory.mktemp("target"))


def drafter(name: str, directory: Path) -> dict[str, object]:
    """The options of a random drafter, whose checkpoint is written."""
    if name == "medusa":
        save_medusa(directory, 3, 1, has_outputs=False)  # heads that need the model's output layer
    elif name == "eagle3":
        save_eagle3(directory)
    else:
        save(make_model("qwen3", num_hidden_layers=1, hidden_size=64), directory)
    return {"speculation": name, "draft_checkpoint": str(directory), "num_draft_tokens": 3}


def generations(sampling: SamplingParams) -> list[Generation]:
    prompts = random_prompts([37, 1, 90, 8])
    return [Generation(prompt, 9 + i, sampling, seed=i) for i, prompt in enumerate(prompts)]


def speculated(runner: ModelRunner, sampling: SamplingParams) -> SpeculatingDriver:
    driver = SpeculatingDriver(runner, 3)
    driver.finish(generations(sampling), 13)
    return driver


@pytest.mark.parametrize("case", quick_of(CASES, {"draft, 2 ranks", "eagle3, 2 ranks"}))
def test_drafts_of_ranks_are_those_of_one(case: str, target: Path, tmp_path: Path) -> None:
    """And tokens are those of no drafts."""
    name, size = CASES[case]
    sampling = GREEDY if size == 4 else SAMPLED
    options = drafter(name, tmp_path)
    plain = generations(sampling)
    Driver(make_runner(target)).finish(plain, 13)
    wanted = speculated(make_runner(target, **options), sampling).drafted
    with ranks_of(target, size, **options) as leader:
        driver, found = SpeculatingDriver(leader, 3), generations(sampling)
        driver.finish(found, 13)
    assert [g.outputs for g in found] == [g.outputs for g in plain]
    assert driver.drafted.chains == wanted.chains
    assert sum(driver.drafted.proposed) > 0


def test_a_target_as_its_own_draft_through_the_engine(target: Path) -> None:
    """With chunks, reuse, preemption and copies to host memory and back."""
    prompts = random_prompts([40, 7, 64, 23])
    prompts = [*prompts, *(prompt[:30] + prompt for prompt in prompts)]
    settings = {"kv_cache_tokens": 240, "kv_cache_host_bytes": 1 << 20}
    wanted = engine_greedy(make_runner(target, **settings), Limits(4, 37), prompts)
    options = {"speculation": "draft", "draft_checkpoint": str(target), "num_draft_tokens": 2}
    with ranks_of(target, 2, **settings, **options) as leader:
        assert engine_greedy(leader, Limits(4, 37), prompts) == wanted


SUMS = {"llama": 2, "gptj": 1, "falcon": 1, "gpt_neox": 1, "cohere": 1, "codegen": 1, "phi": 1}


@pytest.mark.parametrize(
    "case",
    quick_of([f"{name}{how}" for name in SUMS for how in ("", " fixed")], {"llama", "gptj fixed"}),
)
def test_sums_over_ranks_of_a_block(case: str, tmp_path: Path, monkeypatch) -> None:
    """Blocks that add attention and MLP to the same sum make one sum over ranks."""
    family, _, how = case.partition(" ")
    directory = save(make_model(family), tmp_path)
    with ranks_of(directory, 2, deterministic=bool(how)) as leader:
        ranks, counts = leader._joined._ranks, []
        real = ranks.add_sum

        def add_sum(values: torch.Tensor, x: torch.Tensor) -> None:
            counts.append(tuple(x.shape))
            real(values, x)

        monkeypatch.setattr(ranks, "add_sum", add_sum)
        Driver(leader).step([Generation(prompt, 2) for prompt in random_prompts([5, 9])], 64)
        num_blocks = len(leader._layers)
    assert len(counts) == SUMS[family] * num_blocks
