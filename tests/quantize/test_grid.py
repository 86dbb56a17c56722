"""Grids: the nearest number is taken, and a searched range is never worse than the whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slipstream.kernels.gemm.packing import E2M1
from slipstream.layers.norm import Norm
from slipstream.models.fileless import RandomSource
from slipstream.models.source import Weights
from slipstream_quantize.gptq import gptq
from slipstream_quantize.grid import Fitted, Grid, output_error
from slipstream_quantize.observe import Seen, round_int8
from slipstream_quantize.recipe import RECIPES, Recipe
from slipstream_quantize.smooth import (
    awq_candidates,
    awq_scales,
    bounded,
    divide_norm,
    held_by,
    smooth_scales,
)
from torch import Tensor

KINDS = {
    name: replace(RECIPES[name], group=RECIPES[name].group and 16)
    for name in ("fp8", "fp8-block", "int8", "int4", "w4a8", "nvfp4")
}


def grid_of(recipe: Recipe) -> Grid:
    return Grid(recipe, torch.bfloat16)


def matrix(seed: int, n: int = 12, k: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    return weight * torch.rand(n, 1, generator=generator).pow(3) + 0.01


def inputs(seed: int, k: int = 48, count: int = 200) -> Tensor:
    """Correlated rows of which some columns are large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, k // 3, generator=generator) @ torch.randn(
        k // 3, k, generator=generator
    )
    sizes = torch.rand(k, generator=generator).pow(4) * 20 + 0.05
    return (x + 0.3 * torch.randn(count, k, generator=generator)) * sizes


def seen_of(x: Tensor) -> Seen:
    seen = Seen()
    seen.add(x)
    return seen.finish(x)


def test_what_was_never_read_counts_alike_on_the_device_of_its_weights() -> None:
    seen = Seen().finish(torch.empty(3, 8, device="meta"))
    assert {seen.second.device.type, seen.mean.device.type, seen.rows.device.type} == {"meta"}
    assert torch.equal(Seen().finish(torch.empty(3, 8)).second, torch.eye(8))


def norm_of(weight: Tensor, plus_one: bool) -> Norm:
    host = torch.device("cpu")
    norm = Norm(Weights(RandomSource(host), host, torch.float32, "none"), 48, 1e-6, plus_one)
    assert norm.weight is not None
    norm.weight.copy_(weight)
    return norm


def numbers(recipe: Recipe) -> Tensor:
    if recipe.kind == "int":
        top = 2 ** (recipe.bits - 1)
        return torch.arange(-top, top).float()
    if recipe.kind == "e2m1":
        return torch.tensor([*E2M1, *(-x for x in E2M1)])
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return every[every.isfinite()]


@pytest.mark.parametrize("name", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_each_weight_becomes_the_nearest_number(name: str, seed: int) -> None:
    grid, weight = grid_of(KINDS[name]), matrix(seed)
    fitted = grid.fit(weight)
    q = grid.round(weight, fitted)
    scale, zero = (grid.columns(each, weight.shape[1]) for each in fitted[:2])
    off = (weight - (q - zero) * scale).abs()
    every = (numbers(KINDS[name]) - zero[..., None]) * scale[..., None]
    nearest = (every - weight[..., None]).abs().amin(-1)
    assert torch.allclose(off, nearest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["int4", "w4a8", "nvfp4", "fp8", "fp8-block"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_searched_ranges_are_never_worse(name: str, seed: int) -> None:
    """By squares, or by cubes of integers' errors."""
    power = 3 if KINDS[name].kind == "int" else 2
    grid, weight = grid_of(KINDS[name]), matrix(seed)
    whole, searched = grid.fit(weight, clips=False), grid.fit(weight)
    before, after = (
        (weight - grid.values(grid.round(weight, fitted), fitted)).abs().pow(power).sum()
        for fitted in (whole, searched)
    )
    assert after <= before


@pytest.mark.parametrize("name", ["int4", "w4a8", "nvfp4", "fp8", "fp8-block"])
def test_ranges_are_searched(name: str) -> None:
    """Blocks are many here: the whole range may be the best for each of three."""
    grid, weight = grid_of(KINDS[name]), matrix(1, n=40)
    assert not torch.equal(grid.fit(weight, clips=False).scale, grid.fit(weight).scale)


@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_ranges_of_e4m3_leave_nothing_out(name: str, seed: int) -> None:
    """A scale is the one that holds the largest weight, or less than twice it."""
    grid, weight = grid_of(KINDS[name]), matrix(seed, n=40)
    whole, searched = grid.fit(weight, clips=False).scale, grid.fit(weight).scale
    assert ((searched >= whole) & (searched < 2 * whole)).all()
    assert (searched[:16] != searched[16:32]).any()  # rows, and blocks of 16, choose for themselves
    if name == "fp8-block":
        assert torch.equal(searched[:15], searched[1:16])


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_ranges_by_inputs_have_less_error_of_outputs_in_each_group(seed: int) -> None:
    grid, weight = grid_of(KINDS["int4"]), matrix(seed)
    second = seen_of(inputs(seed)).second
    blocks = second * torch.block_diag(*[torch.ones(16, 16)] * 3)
    by_weights, by_inputs = grid.fit(weight), grid.fit(weight, second)
    errors = [
        output_error(weight - grid.values(grid.round(weight, fitted), fitted), blocks)
        for fitted in (by_weights, by_inputs)
    ]
    assert errors[1] <= errors[0] * (1 + 1e-5)


def test_empty_groups_and_equal_weights() -> None:
    for recipe in KINDS.values():
        for value in (0.0, 3.0, -3.0):
            grid, weight = grid_of(recipe), torch.full((2, 32), value)
            fitted = grid.fit(weight)
            got = grid.values(grid.round(weight, fitted), fitted)
            assert torch.allclose(got, weight, rtol=0.01)


def plain_gptq(weight: Tensor, second: Tensor, grid: Grid, fitted: Fitted) -> Tensor:
    """Round columns one by one; solve anew for the others after each (Hassibi and Stork, 1993)."""
    weight, k = weight.double().clone(), weight.shape[1]
    order = torch.argsort(second.diagonal(), descending=True, stable=True).tolist()
    second = second.double() + 0.01 * second.diagonal().double().mean() * torch.eye(k).double()
    scale, zero = (grid.columns(each, k).double() for each in fitted[:2])
    q = torch.zeros(weight.shape)
    for at, column in enumerate(order):
        q[:, column] = grid.snap(weight[:, column], scale[:, column], zero[:, column]).float()
        off = weight[:, column] - (q[:, column] - zero[:, column]) * scale[:, column]
        left = order[at + 1 :]
        if left:
            rest = second[left][:, left]
            weight[:, left] += off[:, None] * torch.linalg.solve(rest, second[left, column])
    return q


@pytest.mark.parametrize("columns", [16, 128])
@pytest.mark.parametrize("name", ["int4", "int8", "nvfp4"])
def test_gptq_is_the_plain_algorithm(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether corrections reach other columns at once or in a few turns."""
    monkeypatch.setattr("slipstream_quantize.gptq._COLUMNS", columns)
    grid, weight, second = grid_of(KINDS[name]), matrix(3), seen_of(inputs(3)).second
    fitted = grid.fit(weight, second)
    got, expected = gptq(weight, second, grid, fitted), plain_gptq(weight, second, grid, fitted)
    assert (got == expected).float().mean() > 0.99  # ties of fp32 and fp64


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_gptq_has_less_error_on_correlated_inputs(seed: int) -> None:
    grid, weight, second = grid_of(KINDS["int4"]), matrix(seed), seen_of(inputs(seed)).second
    fitted = grid.fit(weight)
    errors = [
        output_error(weight - grid.values(q, fitted), second)
        for q in (grid.round(weight, fitted), gptq(weight, second, grid, fitted))
    ]
    assert errors[1] < errors[0]


def test_gptq_of_independent_inputs_is_rounding() -> None:
    grid, weight = grid_of(KINDS["int4"]), matrix(5)
    fitted = grid.fit(weight)
    got = gptq(weight, torch.diag(torch.rand(48) + 0.1), grid, fitted)
    assert torch.equal(got, grid.round(weight, fitted))


@pytest.mark.parametrize("count", [1, 20])
def test_gptq_with_inputs_that_are_never_seen(count: int) -> None:
    grid, weight = grid_of(KINDS["int4"]), matrix(6)
    x = inputs(6, count=count)
    x[:, ::5] = 0
    q = gptq(weight, seen_of(x).second, grid, grid.fit(weight))
    assert q.isfinite().all()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_awq_is_never_worse_than_rounding(seed: int) -> None:
    grid, weight, seen = grid_of(KINDS["int4"]), matrix(seed), seen_of(inputs(seed))
    errors = []
    for scales in (torch.ones(48), awq_scales(weight, seen, grid, lambda x: x)):
        fitted = grid.fit(weight * scales, clips=False)
        rounded = grid.values(grid.round(weight * scales, fitted), fitted) / scales
        errors.append(output_error(weight - rounded, seen.second))
    assert errors[1] <= errors[0]


def test_awq_of_equal_inputs_and_weights_is_rounding() -> None:
    grid, ones = grid_of(KINDS["int4"]), torch.ones(48)
    for scales in awq_candidates(torch.ones(4, 48), ones, grid):
        assert torch.allclose(scales, ones)
    seen = seen_of(torch.eye(48))
    # Powers of one size differ from each other in their last bit, on some processors.
    assert torch.allclose(awq_scales(torch.ones(4, 48), seen, grid, lambda x: x), ones)
    assert torch.equal(bounded(torch.full((4,), 7.0), ones[:4]), ones[:4])


@given(seed=st.integers(0, 2**32 - 1), power=st.floats(0.1, 1))
def test_inputs_that_are_always_zero_move_no_scale(seed: int, power: float) -> None:
    sizes = inputs(seed).abs().mean(0)
    is_read = torch.arange(48) % 7 > 0
    found = bounded((sizes * is_read).pow(power), sizes * is_read)
    alone = bounded(sizes[is_read].pow(power), sizes[is_read])
    torch.testing.assert_close(found[is_read], alone)
    torch.testing.assert_close(found[~is_read], alone.min().expand(7))
    assert torch.equal(bounded(torch.zeros(4), torch.zeros(4)), torch.ones(4))


@given(seed=st.integers(0, 2**32 - 1), plus_one=st.booleans(), spread=st.floats(0, 12))
def test_scales_are_what_a_norm_holds(seed: int, plus_one: bool, spread: float) -> None:
    """Quotients in bfloat16 times what they are said to be divided by: the factors, even zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(48, generator=generator) * 2).bfloat16().float()
    weight[::9] = -float(plus_one)
    norm = norm_of(weight, plus_one)
    scales = torch.exp2((torch.rand(48, generator=generator) - 0.5) * 2 * spread)
    held = held_by(norm, scales, torch.bfloat16)
    assert torch.equal(divide_norm(norm, scales, torch.bfloat16), held)
    assert torch.equal(norm.weight, norm.weight.bfloat16().float())
    factors = norm.weight + plus_one
    torch.testing.assert_close(factors * held, weight + plus_one, rtol=1e-6, atol=0)
    assert torch.equal(held[::9], scales[::9])
    assert bool((held > 0).all())
    torch.testing.assert_close(held_by(norm_of(weight, plus_one), held, torch.bfloat16), held)


@pytest.mark.parametrize("name", ["int8-sq", "awq"])
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 8))
@settings(max_examples=10)
@example(0, 6)
def test_scales_that_are_found_are_those_of_the_norm(name: str, seed: int, spread: int) -> None:
    """Gemma's factors are stored less 1 in bfloat16: small ones are coarse there."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.exp2(-torch.rand(48, generator=generator) * spread) - 1
    stored[5] = -1.0
    norm = norm_of(stored.bfloat16().float(), plus_one=True)
    grid, weight = grid_of(replace(RECIPES[name], group=0)), matrix(seed)
    seen = seen_of(torch.randn(200, 48, generator=generator) * (norm.weight + 1))

    def held(scales: Tensor) -> Tensor:
        return held_by(norm, scales, torch.bfloat16)

    if name == "awq":
        scales = awq_scales(weight, seen, grid, held)
    else:
        scales = smooth_scales(weight, seen, grid, round_int8, held)
    torch.testing.assert_close(divide_norm(norm, scales, torch.bfloat16), scales)
