"""Low-rank terms of rows of several adapters: the CUDA source, emulated, against torch."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.lora import Adapted, Shape
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.lora import terms as lora
from torch import Tensor

BF16, EPSILON = torch.bfloat16, 2**-7
SHAPE = Shape(2072, (258, 30, 64), ((16, 0, 3), (40, 8, 0), (0, 0, 17)))
NUMBERS = [0, *[1] * 9, *[2, 3] * 4, *[0, 1] * 5]  # two groups of the first


def rows_of(count: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(count)
    sizes = (count, sum(SHAPE.sizes)), (count, SHAPE.inputs)
    y, x = (torch.randn(*size, generator=rng).to(BF16) for size in sizes)
    return y, x


def test_terms_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a norm, by parts of the inputs; rows without an adapter keep their bits."""
    emulate(monkeypatch)
    made = Adapted(SHAPE, BF16, "cpu", by_launchers=True)
    y, x = rows_of(len(NUMBERS))
    norm = lora.RowScale(rows_of(1)[1][0], 1e-5, True)
    found = made.run(y, 7 * x, NUMBERS, norm)
    wanted = made.by_torch(y, rms_norm(7 * x, *norm), NUMBERS)
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < 2 * EPSILON
    others = [n == 0 for n in NUMBERS]
    assert torch.equal(found[others], y[others])


@pytest.mark.parametrize("num_groups", [3, pytest.param(300, marks=pytest.mark.rest)])
def test_a_cta_comes_to_all_groups_by_turns(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More groups than a CTA finds at once, of one row each, and none behind them."""
    emulate(monkeypatch)
    monkeypatch.setattr(lora, "_WAVE", 1)
    ranks = tuple((16 * (i % 3), 5) for i in range(num_groups))
    made = Adapted(Shape(32, (34, 2), ranks), BF16, "cpu", by_launchers=True)
    rng = torch.Generator().manual_seed(num_groups)
    y, x = (torch.randn(num_groups, size, generator=rng).to(BF16) for size in (36, 32))
    numbers = [1 + i * 7 % num_groups for i in range(num_groups)]
    wanted = made.by_torch(y, x, numbers)
    assert ((made.run(y, x, numbers).float() - wanted).abs() / (1 + wanted.abs())).max() < EPSILON


def test_bits_of_a_row_do_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    made = Adapted(SHAPE, BF16, "cpu", by_launchers=True)
    y, x = rows_of(len(NUMBERS))
    found = made.run(y, x, NUMBERS, is_fixed=True)
    wanted = made.by_torch(y, x, NUMBERS)
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < EPSILON
    for row in (9, 10, 26):
        here = slice(row, row + 1)
        assert torch.equal(made.run(y[here], x[here], [NUMBERS[row]], is_fixed=True), found[here])
