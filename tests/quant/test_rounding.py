"""Rounding at load: within half a step, never worse than the whole range, zeros stay zeros."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_model, make_runner, save
from hypothesis import given
from hypothesis import strategies as st
from slipstream.quant import rounding
from slipstream.quant.matrix import QuantMatrix, dequantise
from slipstream.quant.rounding import rounded4, rounded8, rounded_e4m3, rounded_for_e4m3

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 150), st.integers(0, 99))


def drawn(n: int, k: int, seed: int) -> torch.Tensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02
    weight[0] = 0
    return weight


@given(SHAPES)
def test_8_bits_are_within_half_a_step(shape: tuple[int, int, int]) -> None:
    weight = drawn(*shape)
    off = (dequantise(rounded8(weight)) - weight).abs()
    assert (off <= weight.abs().amax(1, keepdim=True) / 127 * 0.501).all()
    assert (off[0] == 0).all()


@given(SHAPES)
def test_4_bits_are_no_worse_than_the_whole_range(shape: tuple[int, int, int]) -> None:
    """A plain rounding of each group, with zeros that are integers; cubes of errors count."""
    weight = drawn(*shape)
    off = dequantise(rounded4(weight)) - weight
    assert (off[0] == 0).all()
    for row in range(1, len(weight)):
        for first in range(0, weight.shape[1], 64):
            part = slice(first, first + 64)
            group = weight[row, part]
            low, high = group.min().clamp(max=0), group.max().clamp(min=0)
            scale = (high - low) / 15
            zero = (-low / scale).round()
            plain = (((group / scale).round() + zero).clamp(0, 15) - zero) * scale - group
            assert off[row, part].abs().pow(3).sum() <= plain.abs().pow(3).sum() * 1.0001 + 1e-12


@given(SHAPES)
def test_4_bits_without_zeros_are_no_worse_than_the_whole_range(
    shape: tuple[int, int, int],
) -> None:
    weight = drawn(*shape)
    made = rounded_for_e4m3(weight)
    assert made.is_symmetric
    assert made.row_type == "e4m3"
    off = dequantise(made) - weight
    assert (off[0] == 0).all()
    for first in range(0, weight.shape[1], 128):
        group, found = weight[1:, first : first + 128], off[1:, first : first + 128]
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        step = torch.maximum(-low / 8, high / 7)
        plain = (group / step).round().clamp(-8, 7) * step - group
        before = plain.abs().pow(3).sum(1)
        assert (found.abs().pow(3).sum(1) <= before * 1.0001 + 1e-12).all()


@given(SHAPES)
def test_e4m3_takes_the_scale_of_least_error(shape: tuple[int, int, int]) -> None:
    """Each output by itself, of eight from the one that holds its largest weight to twice it."""
    weight = drawn(*shape)
    values, scales = rounded_e4m3(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (len(weight),)
    off = (values.float() * scales[:, None] - weight).square().sum(1)
    assert off[0] == 0
    for row in range(1, len(weight)):
        errors = []
        for step in range(8):
            scale = weight[row].abs().max() / 448 * 2 ** (step / 8)
            plain = (weight[row] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            errors.append(float((plain - weight[row]).square().sum()))
        assert float(off[row]) == pytest.approx(min(errors), rel=1e-3, abs=1e-12)
        assert 448 * scales[row] >= weight[row].abs().max() * 0.9999


@pytest.mark.parametrize("rounded", [rounded8, rounded4, rounded_for_e4m3])
def test_what_is_rounded_at_a_time_makes_no_difference(
    rounded: Callable[[torch.Tensor], QuantMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = drawn(40, 200, 5)
    whole = rounded(weight)
    for at_once in (1, 1000):
        monkeypatch.setattr(rounding, "_CPU_WEIGHTS", at_once)
        parts = rounded(weight)
        assert torch.equal(parts.codes, whole.codes)
        assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.03), ("int4", 0.5), ("w4a8", 0.5)])
def test_a_model_is_served(scheme: str, most: float, tmp_path: Path) -> None:
    directory = save(make_model("gemma3", sliding_window=16), tmp_path)
    found = {}
    for name in ("none", scheme):
        runner = make_runner(directory, quantization=name)
        generation = Generation(list(range(5, 45)), 1)
        Driver(runner, keep_logits=True).finish([generation], chunk=16)
        found[name] = generation.logits[0]
    off = (found[scheme] - found["none"]).abs().max() / found["none"].abs().max()
    assert 0 < off < most
