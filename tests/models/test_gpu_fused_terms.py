"""Adapters of a mixture's experts on a GPU: by kernels and graphs, and by torch."""

from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, scale_of, write_adapter
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.fused_adapters import (
    PARAMETERS,
    draw_parameters,
    with_parameters,
    write_parameters,
)
from slipstream.runner.model_runner import ModelRunner

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 96}
# Every row has all experts: in 16 bits some would have others than transformers'.
ALL = {"num_experts": 6, "num_experts_per_tok": 6}
TOLERANCES = {"float16": 0.05, "bfloat16": 0.3}


def of_runner(
    runner: ModelRunner, numbers: list[int], chosen: list[int], steps: int = 3
) -> list[Generation]:
    """Sequences with these adapters in one batch."""
    prompts = random_prompts([3, 40, 9, 21, 1, 17])
    rows = [Generation(prompts[i], steps, adapter=numbers[i]) for i in chosen]
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, 16)
    return rows


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [*TOLERANCES, "bfloat16 by torch"])
def test_logits_are_those_of_merged_parameters(
    dtype: str, quantization: str, tmp_path: Path
) -> None:
    """Two adapters of experts, one of attention and rows without any; graphs of two kinds."""
    dtype, *by_torch = dtype.split(maxsplit=1)
    model = make_model("qwen3_moe", **(SIZES | ALL))
    save(model, tmp_path / "base")
    options = {"device": "cuda", "dtype": dtype, "quantization": quantization}
    runner = make_runner(tmp_path / "base", **options)
    runner.adapters.by_tables = by_tables = not by_torch
    drawn = {rank: draw_parameters(model, PARAMETERS, rank, seed=rank) for rank in (5, 40)}
    attention = draw_pairs(model, ["q_proj"], 3, size=0.1)
    folders = [write_parameters(tmp_path / str(r), drawn[r], {}, r) for r in drawn]
    folders.append(write_adapter(tmp_path / "attention", attention, 3))
    of = [runner.adapters.add(runner.adapters.read(str(folder))) for folder in folders]
    numbers = [0, of[0], of[1], of[0], of[2], 0]
    rows = of_runner(runner, numbers, [*range(6)])
    of_runner(runner, numbers, [0, 4, 5])
    ranks = [0, 5, 40, 5, None, 0]
    found: list[tuple[int, float]] = []
    for rank, row in zip(ranks, rows, strict=True):
        if rank is None:
            continue
        with with_parameters(model, drawn.get(rank, {}), scale_of(max(1, rank))), torch.no_grad():
            truth = model(torch.tensor([row.tokens])).logits[0, len(row.prompt) - 1 : -1]
        found.append((rank, float((torch.stack(row.logits) - truth).abs().max())))
    # What the base's fewer bits are off by, its own rows say.
    more = 0.0 if quantization == "none" else 2 * max(apart for rank, apart in found if not rank)
    assert all(apart < TOLERANCES[dtype] + more for _, apart in found), found
    graphs = runner._graphs
    assert graphs is not None
    assert bool(graphs._of_experts) == bool(graphs._adapted) == by_tables


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8"])
def test_bits_of_a_sequence_do_not_depend_on_adapters_beside_it(
    quantization: str, tmp_path: Path
) -> None:
    """In deterministic mode; and what B = 0 gives has the base's bits."""
    model = make_model("qwen3_moe", **SIZES, num_experts=8, num_experts_per_tok=2)
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    runner = make_runner(save(model, tmp_path / "base"), quantization=quantization, **options)
    numbers = [0]
    for rank in (8, 33, 200):
        sides = draw_parameters(model, PARAMETERS, rank, seed=rank)
        folder = write_parameters(tmp_path / str(rank), sides, {}, rank)
        numbers.append(runner.adapters.add(runner.adapters.read(str(folder))))
    zeros = {name: (a, torch.zeros_like(b)) for name, (a, b) in sides.items()}
    folder = write_parameters(tmp_path / "zeros", zeros, {}, 200)
    numbers.append(runner.adapters.add(runner.adapters.read(str(folder))))
    numbers.append(numbers[1])
    together = of_runner(runner, numbers, [*range(6)])
    for i, row in enumerate(together):
        [alone] = of_runner(runner, numbers, [i])
        assert alone.outputs == row.outputs
        assert alone.log_probs == row.log_probs
    [zero], [plain] = (of_runner(runner, each, [4]) for each in (numbers, [0] * 6))
    assert zero.outputs == plain.outputs
    assert zero.log_probs == plain.log_probs
