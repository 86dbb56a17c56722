"""Models with rows in int8 on the CPU: logits are those of the same roundings in fp64."""

import contextlib
from functools import partial
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import Pairs, draw_pairs, merged, scale_of, targets_of, write_adapter
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.parity import LENGTHS, engine_greedy
from fixtures.models.ranks import ranks_of
from fixtures.models.rows_of_gpu import round_rows_as_on_gpu
from fixtures.tiers import quick_of
from slipstream.engine.scheduler import Limits
from slipstream.layers.linear import Linear
from slipstream.quant.matrix import dequantise
from slipstream.quant.rounding import rounded8
from slipstream.runner.model_runner import ModelRunner
from torch import Tensor, nn

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "gemma3": {},
    "gpt_neox": {},
}
RANK = 8
SHARED = ("o_proj", "down_proj")  # whose inputs ranks share


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    round_rows_as_on_gpu(monkeypatch)


def in_units(x: Tensor) -> Tensor:
    """Rows as numbers of int8 by their units: the largest of each over 127."""
    unit = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / unit).round().clamp(-127, 127) * unit


def round_model(model: nn.Module, ranks: int = 1, pairs: Pairs | None = None) -> nn.Module:
    """Put a model into fp64, with weights and rows rounded, by the parts that ranks have.

    What adapters add is made of rows as they are.
    """
    model.double()
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name in ("lm_head", "embed_out"):
            continue
        count = ranks if name.endswith(SHARED) else 1
        parts = layer.weight.data.float().chunk(count, 1)
        weights = [dequantise(rounded8(part)).double() for part in parts]

        pair = (pairs or {}).get(name)
        layer.forward = partial(_forward, layer, weights, pair)  # type: ignore[method-assign]
    return model


def _forward(
    layer: nn.Linear, weights: list[Tensor], pair: tuple[Tensor, Tensor] | None, x: Tensor
) -> Tensor:
    parts = zip(x.chunk(len(weights), -1), weights, strict=True)
    y = sum(in_units(part) @ weight.T for part, weight in parts)
    y = y if layer.bias is None else y + layer.bias
    if pair is None:
        return y
    a, b = (each.double() for each in pair)
    return y + scale_of(RANK) * (x @ a.T @ b.T)


def made_of(runner: ModelRunner, adapter: int = 0) -> list[Generation]:
    prompts = random_prompts([37, 1, 90, 8])
    generations = [Generation(prompt, 3, adapter=adapter) for prompt in prompts]
    Driver(runner, keep_logits=True).finish(generations, chunk=13)
    return generations


@torch.no_grad()
def logits_of(model: nn.Module, generations: list[Generation]) -> Tensor:
    found = [model(torch.tensor([g.tokens])).logits[0, len(g.prompt) - 1 : -1] for g in generations]
    return torch.cat(found).double()


def rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


def check(
    model: nn.Module,
    generations: list[Generation],
    ranks: int = 1,
    pairs: Pairs | None = None,
) -> None:
    ours = torch.cat([torch.stack(g.logits) for g in generations]).double()
    with contextlib.nullcontext() if pairs is None else merged(model, pairs, scale_of(RANK)):
        exact = logits_of(model, generations)
    truth = logits_of(round_model(model, ranks, pairs), generations)
    noise = rms(exact - truth)
    assert noise > 0.002 * rms(truth), "rounding shows"
    # Another order of sums may move a number to its neighbour, and then all that follows.
    assert (ours - truth).abs().amax(-1).median() < 1e-5 * truth.abs().max()
    assert rms(ours - truth) < 0.5 * noise


def linears(runner: ModelRunner) -> list[Linear]:
    block = runner._model.blocks[0]
    return [block.attention.qkv.linear, block.attention.out.linear, block.mlp.down.linear]


@pytest.mark.parametrize("family", quick_of(FAMILIES, {"llama", "gemma3"}))
def test_logits_are_those_of_the_same_roundings(family: str, tmp_path: Path) -> None:
    model = make_model(family, **SIZES | FAMILIES[family])
    runner = make_runner(save(model, tmp_path), quantization="w8a8")
    assert {each.matrix.values.dtype for each in linears(runner)} == {torch.int8}
    check(model, made_of(runner))


def test_ranks_round_their_own_parts_of_rows(tmp_path: Path) -> None:
    """Outputs are shared as they are; inputs have a scale for the part of each rank."""
    model = make_model("llama", **SIZES)
    with ranks_of(save(model, tmp_path), 2, quantization="w8a8") as leader:
        generations = made_of(leader)
    check(model, generations, ranks=2)


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    runner = make_runner(save(make_model("llama", **SIZES), tmp_path), quantization="w8a8")
    prompts = random_prompts(LENGTHS)
    together = engine_greedy(runner, Limits(8, 37), prompts)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert engine_greedy(runner, Limits(8, 2048), [prompt]) == [tokens]


def test_an_adapter_adds_to_rounded_rows_what_it_makes_of_its_own(tmp_path: Path) -> None:
    model = make_model("llama", **SIZES)
    runner = make_runner(save(model, tmp_path / "base"), quantization="w8a8")
    pairs = draw_pairs(model, targets_of(model), RANK, size=0.1)
    read = runner.adapters.read(str(write_adapter(tmp_path / "adapter", pairs, RANK)))
    check(model, made_of(runner, runner.adapters.add(read)), pairs=pairs)
