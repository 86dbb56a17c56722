"""Rows of adapters that kernels add beside those that torch adds: the bits that each has alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.adapters import (
    Pairs,
    draw_pairs,
    expert_pairs,
    key_size,
    targets_of,
    write_adapter,
    write_magnitudes,
    write_prefix,
    write_prompt,
)
from fixtures.models.checkpoints import Driver, Generation, make_model, make_runner, save
from fixtures.tiers import quick_of
from safetensors.torch import save_file
from slipstream.kernels.cpu.native import library
from slipstream.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels of the processor here")
VOCABULARY, VIRTUAL = 1009, 4  # ids, and virtual tokens of an adapter that has some
ROUTERS = ("gate", "shared_expert_gate", "kv_b_proj")  # what magnitudes cannot be of
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 176},
    "gemma2": {"intermediate_size": 176},  # norms behind products
    "gpt_neox": {"intermediate_size": 176},  # no gate
    "phi3": {"intermediate_size": 176},  # matrices in one
    "mixtral": {"intermediate_size": 176},
    "deepseek_v2": {"intermediate_size": 176, "moe_intermediate_size": 40},  # latents
}


def whole_head(model: torch.nn.Module, directory: Path) -> Path:
    """What PEFT writes with `modules_to_save`, beside terms of attention."""
    pairs = draw_pairs(model, targets_of(model)[:1], 4, seed=5)
    directory = write_adapter(directory, pairs, 4, modules_to_save=["lm_head"])
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(model.lm_head.weight.shape, generator=generator) * 0.1
    tensors = {"base_model.model.lm_head.weight": head}
    for name, pair in pairs.items():
        for side, x in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = x.contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def adapters_of(
    runner: ModelRunner, model: torch.nn.Module, family: str, folder: Path
) -> dict[str, Path]:
    """An adapter of each kind that the model takes."""
    names = targets_of(model)
    drawn = {rank: draw_pairs(model, names, rank, rank, 0.1) for rank in (3, 5, 21)}
    plain = {n: p for n, p in drawn[21].items() if not n.endswith(ROUTERS)}
    dora = {n: p for n, p in drawn[5].items() if not n.endswith(ROUTERS)}
    found = {
        "low rank": write_adapter(folder / "low", plain, 21),
        "magnitudes": write_magnitudes(model, dora, folder / "dora"),
        "virtual": write_prompt(folder / "virtual", torch.randn(VIRTUAL, 128) * 0.3),
    }
    if family == "llama":
        found["head"] = whole_head(model, folder / "head")
    if family in ("llama", "gpt_neox"):
        layers, heads, size = key_size(model)
        table = torch.randn(VIRTUAL, 2 * layers * heads * size)
        found["prefix"] = write_prefix(folder / "prefix", table, layers)
    if family == "deepseek_v2":
        found["latents"] = write_adapter(folder / "latents", drawn[3], 3)
    if family == "mixtral":
        pairs: Pairs = expert_pairs(runner, [0, 2, 3], 3, ("_proj",))[1]
        found["experts"] = write_adapter(folder / "experts", pairs, 3)
        head = torch.randn(3, 128), torch.randn(VOCABULARY, 3) * 0.1
        pairs |= {"lm_head": head} | draw_pairs(model, ["q_proj"], 3)
        found["experts and head"] = write_adapter(folder / "both", pairs, 3)
    return found


def generate(
    runner: ModelRunner, adapters: Mapping[str, int], which: list[str]
) -> list[Generation]:
    """Step sequences of these kinds together, in chunks and decodes."""
    rows = []
    for kind in which:
        place = list(adapters).index(kind)
        prompt = [(37 * i + 11 * place) % VOCABULARY for i in range(5 + 4 * place)]
        if kind in ("virtual", "prefix"):
            prompt = [*range(VOCABULARY, VOCABULARY + VIRTUAL), *prompt]
        rows.append(Generation(prompt, 3, adapter=adapters[kind]))
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, 11)
    return rows


@pytest.mark.parametrize("family", quick_of(SIZES, ("llama", "mixtral")))
def test_a_row_has_the_bits_that_it_has_alone(family: str, tmp_path: Path) -> None:
    """In deterministic mode; otherwise within rounding, both ways."""
    model = make_model(family, **SIZES[family])
    base = save(model, tmp_path / "base")
    runner, other = make_runner(base, deterministic=True), make_runner(base)
    numbers = {"none": 0}
    for kind, directory in adapters_of(runner, model, family, tmp_path).items():
        for each in (runner, other):
            numbers[kind] = each.adapters.add(each.adapters.read(str(directory)))
    kinds = list(numbers)
    laid = {kind for kind, n in numbers.items() if n and runner.adapters._loaded[n].laid}
    assert laid == {"low rank", "experts"} & set(kinds)
    alone_of = {kind: generate(runner, numbers, [kind])[0] for kind in kinds}
    for together in (kinds, kinds[::-1], ["low rank", "magnitudes"], ["none", "virtual"]):
        for kind, row in zip(together, generate(runner, numbers, together), strict=True):
            alone = alone_of[kind]
            assert row.log_probs == alone.log_probs, (kind, together)
            for own, beside in zip(alone.logits, row.logits, strict=True):
                assert torch.equal(own, beside), (kind, together)
    for kind, row in zip(kinds, generate(other, numbers, kinds), strict=True):
        for own, near in zip(alone_of[kind].logits, row.logits, strict=True):
            assert (own - near).abs().max() < 1e-4 * max(1, own.abs().max()), kind
