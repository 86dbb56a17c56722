"""Low-rank terms on the processor, by its kernels, beside torch's terms one by one."""

import pytest
import torch
from fixtures.kernels.instruction_sets import HERE, within
from fixtures.kernels.lora import Adapted, Shape, shapes
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.cpu.native import library
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream.kernels.lora.terms import expand, shrink
from slipstream.kernels.runtime.registry import CPU

if library() is None:
    pytest.skip("this machine has no C++ compiler or no AVX2", allow_module_level=True)


@given(shapes(560), st.data())
def test_terms_are_those_of_torch(shape: Shape, data: st.DataObject) -> None:
    """Rows lie apart, in more memory; a norm is computed with the terms."""
    numbers = data.draw(
        st.lists(st.integers(0, len(shape.ranks)), min_size=1, max_size=40), label="adapters"
    )
    form = data.draw(st.sampled_from(HERE), label="form")
    plus_one = data.draw(st.none() | st.booleans(), label="norm")
    is_turned = data.draw(st.booleans(), label="B is turned")
    made = Adapted(shape, torch.float32, "cpu", is_turned=is_turned)
    y = torch.randn(len(numbers), sum(shape.sizes) + 3)[:, 1:-2]
    x = torch.randn(len(numbers), shape.inputs + 5)[:, 2:-3]
    weight = torch.randn(shape.inputs)
    norm = None if plus_one is None else RmsNorm(weight, 1e-5, plus_one)
    with within(form):
        found = made.run(y, x, numbers, norm)
    rows = x if norm is None else rms_norm(x.contiguous(), weight, 1e-5, norm.plus_one)
    table = made.table(numbers)
    t = shrink.oracle(rows, table.groups, table.rows, 1, table.width)
    by_oracle = expand.oracle(y.clone(), table.groups, table.rows, t, 1, shape.sizes)
    wanted = made.by_torch(y.clone(), rows, numbers)
    assert ((by_oracle - wanted).abs() / (1 + wanted.abs())).max() < 1e-4
    assert ((found - wanted).abs() / (1 + wanted.abs())).max() < 1e-4
    others = [n == 0 for n in numbers]
    assert torch.equal(found[others], y[others])


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("form", HERE)
def test_a_row_has_the_same_bits_whatever_is_beside_it(form: str, is_turned: bool) -> None:
    shape = Shape(72, (70, 6, 34), ((1, 0, 40), (16, 5, 16), (0, 33, 0)))
    made = Adapted(shape, torch.float32, "cpu", is_turned=is_turned)
    numbers = [1, 2, 1, 3, 0, 2, 2, 1] * 6
    y, x = torch.randn(len(numbers), 110), torch.randn(len(numbers), 72)
    with within(form):
        together = made.run(y, x, numbers)
        for i, number in enumerate(numbers):
            assert torch.equal(together[i], made.run(y[i : i + 1], x[i : i + 1], [number])[0])


def test_they_are_chosen_for_fp32_alone() -> None:
    groups, rows = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    for dtype, name in ((torch.float32, "C++"), (torch.bfloat16, "torch")):
        x = torch.zeros(3, 8, dtype=dtype)
        spec = tuple((each.shape, each.dtype, each.device) for each in (x, groups, rows))
        chosen = shrink.implementations.choose(spec, CPU)
        assert chosen is not None
        assert chosen.implementation.name == name
    assert library() is not None
