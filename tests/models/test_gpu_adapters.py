"""Adapters on a GPU: as near to merged weights as the base is to its own, beside CUDA graphs."""

from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, merged, scale_of, targets_of, write_adapter
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 560}
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_logits_are_those_of_merged_weights(dtype: str, is_fixed: bool, tmp_path: Path) -> None:
    model = make_model("llama", **SIZES)
    save(model, tmp_path / "base")
    runner = make_runner(tmp_path / "base", device="cuda", dtype=dtype, deterministic=is_fixed)
    drawn = {rank: draw_pairs(model, targets_of(model), rank, rank, 0.1) for rank in (1, 16, 65)}
    numbers = {0: 0}
    for rank, pairs in drawn.items():
        read = runner.adapters.read(str(write_adapter(tmp_path / str(rank), pairs, rank)))
        numbers[rank] = runner.adapters.add(read)
    ranks = [0, 1, 16, 65, 16, 0]
    prompts = random_prompts([3, 40, 9, 21, 1, 17])
    rows = [
        Generation(prompt, 3, adapter=numbers[rank])
        for prompt, rank in zip(prompts, ranks, strict=True)
    ]
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, 16)
    for rank, row in zip(ranks, rows, strict=True):
        with merged(model, drawn.get(rank, {}), scale_of(max(1, rank))), torch.no_grad():
            truth = model(torch.tensor([row.tokens])).logits[0, len(row.prompt) - 1 : -1]
        apart = (torch.stack(row.logits) - truth).abs().max()
        assert apart < TOLERANCES[dtype], (rank, float(apart))
