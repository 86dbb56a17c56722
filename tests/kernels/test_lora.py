"""Low-rank terms by tables: the oracle beside torch's terms one by one, and the tables."""

import numpy as np
import torch
from fixtures.kernels.lora import Adapted, Shape
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.lora import terms as lora
from slipstream.runner.adapter_tables import most_groups, tabulate
from slipstream.runner.step_arrays import StepShape


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    sizes = draw(st.lists(st.integers(1, 20).map(lambda n: 2 * n), min_size=1, max_size=3))
    ranks = st.tuples(*[st.just(0) | st.integers(1, 40) for _ in sizes])
    return Shape(
        8 * draw(st.integers(1, 9)), tuple(sizes), tuple(draw(st.lists(ranks, max_size=4)))
    )


@given(shapes(), st.data())
def test_rows_of_any_adapters_get_their_terms_and_others_stay(
    shape: Shape, data: st.DataObject
) -> None:
    numbers = data.draw(
        st.lists(st.integers(0, len(shape.ranks)), min_size=1, max_size=40), label="adapters"
    )
    made = Adapted(shape, torch.float32, "cpu")
    y, x = torch.randn(len(numbers), sum(shape.sizes)), torch.randn(len(numbers), shape.inputs)
    found = made.run(y, x, numbers)
    assert (found - made.by_torch(y, x, numbers)).abs().max() < 1e-4
    assert torch.equal(found[[n == 0 for n in numbers]], y[[n == 0 for n in numbers]])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1), st.integers(0, 3))
def test_every_row_with_an_adapter_is_in_one_group_of_it(
    runs: list[tuple[int, int]], spare: int
) -> None:
    numbers = [number for number, count in runs for _ in range(count)]
    addresses = {number: 1000 + number for number in range(1, 6)}
    shape = StepShape(len(numbers), len(set(numbers)), 0, len(numbers), len(numbers))
    groups, rows, marks = tabulate(
        np.array(numbers), addresses, most_groups(len(numbers), shape) + spare
    )
    seen: dict[int, int] = {}
    for address, place in groups.tolist():
        begin, count = place & 0xFFFFFFFF, place >> 32
        assert count <= lora.TILE
        assert bool(count) == bool(address)
        for row in rows[begin : begin + count].tolist():
            assert row not in seen
            seen[row] = address - 1000
    assert seen == {row: number for row, number in enumerate(numbers) if number}
    assert marks.tolist() == [int(number > 0) for number in numbers]


def test_what_the_kernels_do_not_take_is_said() -> None:
    assert lora.refusal(4096, (4096, 1024, 1024)) is None
    assert "4 matrices" in str(lora.refusal(64, (2, 2, 2, 2)))
    assert "12 inputs" in str(lora.refusal(12, (2,)))
    assert "(3,)" in str(lora.refusal(16, (3,)))
