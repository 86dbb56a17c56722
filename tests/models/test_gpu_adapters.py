"""Adapters on a GPU: as near to merged weights as the base is to its own, beside CUDA graphs."""

from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import (
    draw_pairs,
    expert_pairs,
    merged,
    scale_of,
    targets_of,
    write_adapter,
    write_magnitudes,
)
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from slipstream.runner.adapter_pages import LEAST_PAGE, PageCopies

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "intermediate_size": 560}
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", [*TOLERANCES, "bfloat16 by torch"])
def test_logits_are_those_of_merged_weights(dtype: str, is_fixed: bool, tmp_path: Path) -> None:
    """By kernels and graphs in 16 bits, else by torch."""
    dtype, *by_torch = dtype.split(maxsplit=1)
    model = make_model("llama", **SIZES)
    save(model, tmp_path / "base")
    runner = make_runner(tmp_path / "base", device="cuda", dtype=dtype, deterministic=is_fixed)
    adapters = runner.adapters
    adapters.by_tables = by_tables = adapters.by_tables and not by_torch
    assert by_tables == (dtype != "float32" and not by_torch)
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
        for logits, token, log_prob in zip(row.logits, row.outputs, row.log_probs, strict=True):
            # Eager logits beside those of the step, whose padded shape may have other kernels.
            apart = abs(float(logits.log_softmax(-1)[token]) - log_prob)
            assert apart < max(1e-2, 0.1 * TOLERANCES[dtype])
    assert runner._graphs is not None
    assert bool(runner._graphs._adapted) == by_tables


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4", "w8a8"])
def test_bits_of_a_sequence_do_not_depend_on_adapters_beside_it(
    quantization: str, tmp_path: Path
) -> None:
    model = make_model("llama", **SIZES)
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    runner = make_runner(save(model, tmp_path / "base"), quantization=quantization, **options)
    drawn = [draw_pairs(model, targets_of(model), rank, rank, 0.1) for rank in (8, 33, 200)]
    numbers = [0]
    for rank, pairs in zip((8, 33, 200), drawn, strict=True):
        read = runner.adapters.read(str(write_adapter(tmp_path / str(rank), pairs, rank)))
        numbers.append(runner.adapters.add(read))
    prompts = random_prompts([20, 5, 31, 9])

    def generated(chosen: list[int]) -> list[Generation]:
        rows = [Generation(prompts[i], 4, adapter=numbers[i]) for i in chosen]
        Driver(runner).finish(rows)
        return rows

    together = generated([0, 1, 2, 3])
    for i, row in enumerate(together):
        alone = generated([i])[0]
        assert alone.outputs == row.outputs
        assert alone.log_probs == row.log_probs


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_bits_beside_adapters_that_torch_adds_are_those_alone(family: str, tmp_path: Path) -> None:
    """Magnitudes and a head, which have no graph, beside rows whose steps alone are graphs."""
    model = make_model(family, **SIZES)
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    runner = make_runner(save(model, tmp_path / "base"), **options)
    names = [name for name in targets_of(model) if name != "gate"]  # routers have no terms
    drawn = {rank: draw_pairs(model, names, rank, rank, 0.1) for rank in (5, 21)}
    head = torch.randn(4, 256), torch.randn(len(model.lm_head.weight), 4) * 0.1
    ends = draw_pairs(model, names[:1], 4) | {"lm_head": head}
    directories = [
        write_adapter(tmp_path / "low", drawn[21], 21),
        write_magnitudes(model, drawn[5], tmp_path / "magnitudes"),
        write_adapter(tmp_path / "head", ends, 4),
    ]
    if family == "mixtral":
        experts = expert_pairs(runner, [0, 2, 3], 3, ("_proj",))[1]
        directories.append(write_adapter(tmp_path / "experts", experts, 3))
    adapters = runner.adapters
    numbers = [0, *(adapters.add(adapters.read(str(each))) for each in directories)]
    laid = [adapters._loaded[number].laid is not None for number in numbers[1:]]
    assert laid == [True, False, False, True][: len(laid)]
    prompts = random_prompts([20, 5, 31, 9, 14])

    def generated(chosen: list[int]) -> list[Generation]:
        rows = [Generation(prompts[i], 4, adapter=numbers[i]) for i in chosen]
        driver = Driver(runner)
        while not all(row.is_finished for row in rows):
            driver.step(rows, 16)
        return rows

    every = [*range(len(numbers))]
    for together in (every, every[::-1], [1, 2]):
        for i, row in zip(together, generated(together), strict=True):
            [alone] = generated([i])
            assert alone.outputs == row.outputs, (i, together)
            assert alone.log_probs == row.log_probs, (i, together)


@pytest.mark.parametrize("num_pages", [0, 1, 32, 33, 100])
def test_pages_come_to_the_device_as_they_are(num_pages: int) -> None:
    """Through pinned memory for 32 of them at a time; and again, as it is used once more."""
    device = torch.device("cuda")
    copies = PageCopies(LEAST_PAGE, device)
    for seed in range(2):
        rng = torch.Generator().manual_seed(seed)
        memory = torch.randint(0, 256, (max(1, num_pages), LEAST_PAGE), generator=rng)
        memory = memory.to(torch.uint8)
        pages = copies(memory.flatten(), num_pages)
        torch.cuda.synchronize()
        assert len(pages) == num_pages
        for page, own in zip(pages, memory, strict=False):
            assert page.device.type == device.type
            assert torch.equal(page.cpu(), own)
