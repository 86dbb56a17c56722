"""Low-rank terms by tables: the oracle beside torch's terms one by one, and the tables."""

import re

import numpy as np
import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.lora import Adapted, Shape, shapes
from fixtures.kernels.recording import recorded
from fixtures.tiers import quick_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.elementwise.norm import RmsNorm
from slipstream.kernels.gemm.sm90 import skinny
from slipstream.kernels.lora import terms as lora
from slipstream.kernels.runtime import jit
from slipstream.runner.adapter_tables import most_groups, tabulate
from slipstream.runner.step_shape import StepShape


@given(shapes(40), st.data())
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


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize(
    "shape",
    quick_of(
        (
            Shape(40, (10, 6), ((1, 40), (16, 0), (0, 5))),
            Shape(4104, (300, 70, 2), ((3, 17, 33), (64, 0, 1))),
        ),
        (Shape(40, (10, 6), ((1, 40), (16, 0), (0, 5))),),
    ),
)
def test_the_kernels_from_their_source(
    shape: Shape, is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA source, emulated: tiles lie anywhere, some rows have no adapter."""
    emulate(monkeypatch)
    monkeypatch.setattr(lora, "shrink", lora.shrink.launcher)
    monkeypatch.setattr(lora, "expand", lora.expand.launcher)
    made = Adapted(shape, torch.bfloat16, "cpu")
    numbers = [i % (len(shape.ranks) + 1) for i in range(21)]
    rng = torch.Generator().manual_seed(1)
    y, x = (
        torch.randn(len(numbers), size, generator=rng).bfloat16()
        for size in (sum(shape.sizes), shape.inputs)
    )
    found = made.run(y, x, numbers, is_fixed=is_fixed)
    wanted = made.by_torch(y, x, numbers)
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < 2**-7
    others = [n == 0 for n in numbers]
    assert torch.equal(found[others], y[others])
    assert not torch.equal(found, y)


@pytest.mark.rest
def test_kernels_find_room_beside_a_gemm_of_few_rows() -> None:
    """In an 8B model's shapes of 32 rows: of 228 KB a multiprocessor, 1 KB of each CTA is lost."""
    pytest.importorskip("cuda.bindings", reason="NVRTC comes with the extra nvrtc")
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    rings = [skinny.tiling(32, m, k // 64, 132).bytes for m, k in shapes]
    for source in ("lora/shrink.cu", "lora/expand.cu"):
        _, report = jit.compile_variant(jit.variant(source, torch.bfloat16), "sm_90a")
        taken = [int(size) for size in re.findall(r"(\d+) bytes smem", report)]
        assert taken, report
        assert max(taken) + max(rings) + (2 << 10) <= 228 << 10


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1), st.integers(0, 3))
def test_every_row_is_in_one_group_of_its_adapter(runs: list[tuple[int, int]], spare: int) -> None:
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
        assert count or not address
        for row in rows[begin : begin + count].tolist():
            assert row not in seen
            seen[row] = address - 1000 if address else 0
    assert seen == dict(enumerate(numbers))
    counts = [place >> 32 for _, place in groups.tolist()]
    assert 0 not in counts[: len(counts) - counts.count(0)], "empty groups come last"
    terms = [address for address, place in groups.tolist() if place]
    assert 0 not in terms[: len(terms) - terms.count(0)], "rows without an adapter come last"
    assert marks.tolist() == [int(number > 0) for number in numbers]


def test_what_the_kernels_do_not_take_is_said() -> None:
    assert lora.refusal(4096, (4096, 1024, 1024)) is None
    assert "4 matrices" in str(lora.refusal(64, (2, 2, 2, 2)))
    assert "12 inputs" in str(lora.refusal(12, (2,)))
    assert "(3,)" in str(lora.refusal(16, (3,)))


@pytest.mark.parametrize(
    ("num_rows", "is_fixed", "splits"),
    [(1, False, 8), (64, False, 8), (2048, False, 2), (8192, False, 1), (1, True, 1)],
)
def test_a_place_is_two_launches_with_all_that_the_kernels_take(
    num_rows: int, is_fixed: bool, splits: int
) -> None:
    inputs, sizes = 14336, (4096, 1024, 1024)
    with recorded() as notes:
        y, x, weight = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((num_rows, sum(sizes)), (num_rows, inputs), (inputs,))
        )
        groups = torch.empty(3, 2, dtype=torch.int64, device="meta")
        rows = torch.empty(num_rows, dtype=torch.int32, device="meta")
        norm = RmsNorm(weight, 1e-5, plus_one=False)
        t = lora.shrink(x, groups, rows, 1, 48, norm, is_fixed)
        lora.expand(y, groups, rows, t, 1, sizes)
    norm_name, (shrink, given), (expand, added) = notes[0][0], *notes[1:]
    assert (norm_name, shrink, expand) == ("rms_norm", "shrink", "expand")
    assert f"(3, {splits}, " in given
    assert "(24, 3) 256" in added
    for name, arguments in notes[1:]:
        source = (jit.FOLDER / f"lora/{name}.cu").read_text()
        (parameters,) = re.findall(rf"\b{name}\((T\* y|const T\* x)([^)]*)\)", source)
        passed = re.sub(r"\[[^\]]*\]", "", arguments.split(" 256 (")[1].split(") [")[0])
        assert passed.count(",") == parameters[1].count(",")
