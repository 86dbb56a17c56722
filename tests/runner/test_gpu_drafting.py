"""Drafters on a GPU: tokens are those without, graphs and steps in flight included."""

from pathlib import Path

import pytest
from fixtures.models.checkpoints import Generation, make_model, make_runner, random_prompts, save
from fixtures.models.drafters import SpeculatingDriver, save_eagle3, save_medusa
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu


def run(directory: Path, num_drafts: int, **overrides: object) -> tuple[list, SpeculatingDriver]:
    settings = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "deterministic": True}
    driver = SpeculatingDriver(make_runner(directory, **(settings | overrides)), num_drafts)
    found = [
        Generation(prompt, 20 + i, SamplingParams(max_tokens=1, temperature=0.8 * (i % 2)), seed=i)
        for i, prompt in enumerate(random_prompts([37, 1, 90, 8, 16]))
    ]
    driver.finish(found, 13)
    return [g.outputs for g in found], driver


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle3"])
def test_tokens_are_those_without(kind: str, tmp_path: Path) -> None:
    target = save(make_model("llama", num_hidden_layers=3), tmp_path / "target")
    draft = tmp_path / "draft"
    if kind == "draft":
        draft = target
    elif kind == "medusa":
        save_medusa(draft)
    else:
        save_eagle3(draft)
    expected, _ = run(target, 0)
    options = {"speculation": kind, "draft_checkpoint": str(draft), "num_draft_tokens": 3}
    found, driver = run(target, 3, **options)
    assert found == expected
    assert sum(driver.drafted.proposed) > 20
    if kind == "draft":
        assert driver.drafted.rate > 0.8  # its bits may differ from the target's, its model not
    # Without the deterministic mode only that it runs, with graphs: bits depend on the batch.
    run(target, 3, **options, deterministic=False)
