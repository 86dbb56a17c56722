"""Low-rank terms of rows of several adapters: the CUDA source, emulated, against torch."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.lora import Adapted, Shape
from slipstream.kernels.elementwise.activation import GATES
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
    """By parts of the inputs; rows without an adapter keep their bits."""
    emulate(monkeypatch)
    made = Adapted(SHAPE, BF16, "cpu", by_launchers=True)
    y, x = rows_of(len(NUMBERS))
    found = made.run(y, x, NUMBERS)
    wanted = made.by_torch(y, x, NUMBERS)
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < EPSILON
    others = [n == 0 for n in NUMBERS]
    assert torch.equal(found[others], y[others])


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("size", [264, 258])
def test_a_gate_is_applied_to_all_rows_on_the_way(
    size: int, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bits of its own kernel; in accesses of 16 bytes, or of 4 where rows begin between."""
    emulate(monkeypatch)
    own = ((16, 3), (0, 40), (0, 0), (33, 0))
    made = Adapted(Shape(40, (size, size), own), BF16, "cpu", by_launchers=True)
    numbers = [0, *[1] * 18, 2, 2, *[3, 0] * 9, 4]
    rng = torch.Generator().manual_seed(size)
    y, x = (torch.randn(len(numbers), each, generator=rng).to(BF16) for each in (2 * size, 40))
    found = made.run(y, x, numbers, gate=gate)
    apart = GATES[gate].launcher(made.run(y, x, numbers))
    assert torch.equal(found, apart)
    wanted = GATES[gate].oracle(made.by_torch(y, x, numbers))
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < 2 * EPSILON


@pytest.mark.parametrize("num_groups", [3, pytest.param(300, marks=pytest.mark.rest)])
def test_a_cta_comes_to_all_groups_by_turns(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More groups than a CTA finds at once, of one row each, and none behind them."""
    emulate(monkeypatch)
    monkeypatch.setattr(lora, "_OF_TWO", 1)
    monkeypatch.setattr(lora, "_OF_THREE", 1)
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
