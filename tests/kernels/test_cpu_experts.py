"""Products of experts by the processor's kernels, beside their oracle: forms, rows, threads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fixtures.kernels.checking import same_bits
from fixtures.kernels.instruction_sets import forms, within
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.cpu.native import library
from slipstream.kernels.experts.combine import Shared, combine
from slipstream.kernels.experts.grouped import Added, ExpertMatrix, down, expert_matrix, gate_up
from slipstream.kernels.experts.route import Routed, route
from slipstream.kernels.experts.spec import Gate, Routing, Score
from slipstream.kernels.gemm.op import Matrix
from slipstream.quant.forms import make_numbers, make_tiles
from slipstream.quant.matrix import Kind, QuantMatrix, dequantise, halves
from torch import Tensor

if library() is None:
    pytest.skip("this machine has no C++ compiler or no AVX2", allow_module_level=True)

KINDS = (
    "4 bits",
    "4 bits, minimums",
    "8 bits",
    "8 bits by 16",
    "e2m1",
    "e2m1 by 16",
    "bf16",
    "fp16",
    "fp32",
)
ROUNDED = 3e-4  # of the largest sum: rows become whole numbers of 16 bits
EXACT = 8e-6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def weights_of(
    kind: str, outputs: int, inputs: int, made: torch.Generator
) -> tuple[Matrix, Tensor]:
    """Random weights as the kernels have them, and what they stand for."""
    if kind in ("bf16", "fp16", "fp32"):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
        weight = (torch.randn(outputs, inputs, generator=made) / inputs**0.5).to(dtype)
        return make_numbers(weight), weight.float()
    bits, group = 8 if kind.startswith("8") else 4, 16 if kind.endswith("16") else 32
    groups = outputs, -(-inputs // group)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=made)
    scales = (torch.rand(groups, generator=made) + 0.5) / inputs**0.5 / (1 << bits - 1)
    minimums = zeros = None
    if "minimums" in kind:
        minimums = (torch.rand(groups, generator=made) - 0.5) / inputs**0.5
        zeros = torch.zeros(groups, dtype=torch.uint8)
    if kind.startswith("e2m1"):
        scales = torch.exp2(torch.randint(-9, -3, groups, generator=made).float())
        matrix = QuantMatrix(Kind.F4, halves(codes), scales, group, inputs)
    elif bits == 4:
        matrix = QuantMatrix(Kind.W4, halves(codes), scales, group, inputs, zeros, minimums)
    else:
        matrix = QuantMatrix(Kind.W8, (codes - 128).to(torch.int8), scales, group, inputs)
    return make_tiles(matrix), dequantise(matrix)


class Case:
    """A layer of experts, with rows and their choice."""

    def __init__(
        self, kind: str, sizes: tuple[int, ...], gate: Gate, bias: bool, seed: int
    ) -> None:
        self.made = made = torch.Generator().manual_seed(seed)
        rows, self.count, top_k, self.hidden, self.inner = sizes
        self.gate, self.bias = gate, bias
        self.x = torch.randn(rows, self.hidden + 3, generator=made)[:, : self.hidden]
        self.logits = torch.randn(rows, self.count, generator=made)
        self.routing = Routing(self.count, min(top_k, self.count), normalises=True)
        self.first, self.dense_first = self._matrix(kind, 2 * self.inner, self.hidden)
        self.last, self.dense_last = self._matrix(kind, self.hidden, self.inner)

    def _matrix(self, kind: str, outputs: int, inputs: int) -> tuple[ExpertMatrix, ExpertMatrix]:
        matrix, dense = weights_of(kind, self.count * outputs, inputs, self.made)
        bias = torch.randn(self.count, outputs, generator=self.made) if self.bias else None
        found = expert_matrix(matrix, self.count, bias)
        return found, ExpertMatrix(dense.view(self.count, outputs, inputs), None, bias)

    def products(self, x: Tensor, logits: Tensor) -> tuple[Routed, Tensor, Tensor]:
        """The choice, inner values by places, and outputs of pairs."""
        routed = route(logits, self.routing, 8)
        inner = gate_up(x, self.first.values, self.first, routed, self.gate)
        return routed, inner, down(inner, self.last.values, self.last, routed)


others = (
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 9),
        st.integers(1, 3),
        st.sampled_from([32, 64, 96, 160]),
        st.integers(1, 4).map(lambda n: 16 * n),
    ),
    st.sampled_from(list(Gate)),
    st.booleans(),
    st.integers(0, 1 << 16),
)
cases = st.builds(Case, st.sampled_from(KINDS), *others)


def close(found: Tensor, want: Tensor, share: float) -> None:
    assert found.shape == want.shape
    assert torch.isfinite(found).all()
    limit = share * max(1.0, float(want.abs().max())) if want.numel() else 0
    assert found.numel() == 0 or float((found - want).abs().max()) <= limit


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=8)
@given(st.tuples(*others), st.sampled_from([1, 2, 3]), forms, forms)
def test_products_are_those_of_each_expert(
    kind: str, drawn: tuple[Any, ...], threads: int, form: str, other: str
) -> None:
    """The weights are dequantised there. Neither threads nor the instruction set change bits."""
    case = Case(kind, *drawn)
    torch.set_num_threads(threads)
    with within(form):
        routed, inner, products = case.products(case.x, case.logits)
    is_exact = case.first.values.dtype != torch.uint8
    share = EXACT if is_exact else ROUNDED
    dense = case.dense_first
    want = gate_up.oracle(case.x, dense.values, dense, routed, case.gate)
    close(inner, want, share)
    dense = case.dense_last
    close(products, down.oracle(inner, dense.values, dense, routed), share)
    torch.set_num_threads(1)
    with within(other):
        assert all(map(same_bits, case.products(case.x, case.logits)[1:], (inner, products)))


@pytest.mark.parametrize("gate", list(Gate))
@pytest.mark.parametrize("kind", KINDS)
def test_what_adapters_add_comes_before_the_gate(kind: str, gate: Gate) -> None:
    """Places without any keep their bits, and zeros change none."""
    case = Case(kind, (40, 5, 2, 96, 48), gate, bias=True, seed=1)
    routed, plain, _ = case.products(case.x, case.logits)
    values = torch.randn(len(plain), 96, generator=case.made)
    marks = torch.rand(len(plain), generator=case.made) < 0.5
    values[~marks] = torch.nan
    added = Added(values, marks.int())
    given = case.first.values, case.first, routed, gate, False
    found = gate_up(case.x, *given, added)
    dense = case.dense_first
    want = gate_up.oracle(case.x, dense.values, dense, routed, gate, added=added)
    close(found, want, EXACT if case.first.values.dtype != torch.uint8 else ROUNDED)
    assert same_bits(found[~marks], plain[~marks])
    assert ((found - plain)[marks].abs() > 0.1).any(1).all()
    zeros = added._replace(values=torch.zeros_like(values))
    assert torch.equal(gate_up(case.x, *given, zeros), plain)


@settings(deadline=None, max_examples=15)
@given(cases, st.data())
def test_a_row_does_not_depend_on_its_neighbours(case: Case, data: st.DataObject) -> None:
    """Bit for bit; and what is no number stays in its row."""
    rows = len(case.x)
    if not rows:
        return
    row = data.draw(st.integers(0, rows - 1))
    case.x = case.x.clone()
    case.x[row, data.draw(st.integers(0, case.hidden - 1))] = data.draw(
        st.sampled_from([float("nan"), float("inf")])
    )
    whole = case.products(case.x, case.logits)[2].view(rows, -1, case.hidden)
    assert whole[row].isnan().any(-1).all() or not whole[row].isfinite().all()
    for other in range(rows):
        alone = case.products(case.x[other : other + 1], case.logits[other : other + 1])[2]
        found = whole[other]
        assert other == row or (found.isfinite().all() and same_bits(alone, found))


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 20), st.integers(1, 5), st.integers(1, 70), st.sampled_from(["", "all", "gate"])
)
def test_terms_are_added_in_the_order_of_ranks(rows: int, top_k: int, width: int, has: str) -> None:
    """To the last bit, but for the logistic gate."""
    made = torch.Generator().manual_seed(rows * 77 + width)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    residual, terms, shared = random(rows, width + 1)[:, :width], random(rows * top_k, width), None
    if has:
        shared = Shared(random(rows, width), random(rows, 9)[:, 4:5] if has == "gate" else None)
    want = combine.oracle(residual.clone(), terms, shared)
    found = combine(residual, terms, shared)
    assert found.data_ptr() == residual.data_ptr()
    if has == "gate":
        torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-6)
    else:
        assert same_bits(found.contiguous(), want.contiguous())


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 40),
    st.integers(1, 70),
    st.integers(1, 8),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([Score.SOFTMAX, Score.SIGMOID]),
    st.booleans(),
    st.booleans(),
)
def test_choice_and_places_are_those_of_the_definition(
    rows: int, count: int, top_k: int, tile_rows: int, score: Score, corrected: bool, whole: bool
) -> None:
    """The lower number is chosen where scores are equal."""
    made = torch.Generator().manual_seed(rows * 99 + count)
    logits = torch.randn(rows, count + 3, generator=made)[:, :count]
    logits = logits.round() if whole else logits
    correction = torch.randn(count, generator=made).round() if corrected else None
    routing = Routing(count, min(top_k, count), score, whole, 1.5)
    found = route(logits, routing, tile_rows, correction)
    want = route.oracle(logits, routing, tile_rows, correction)
    torch.testing.assert_close(found.weights, want.weights)
    if torch.equal(found.experts, want.experts):
        assert all(map(torch.equal, found[2:5], want[2:5]))
    else:  # scores that differ by their rounding alone
        assert not whole
        scores = torch.softmax(logits, -1) if score is Score.SOFTMAX else torch.sigmoid(logits)
        by = scores + correction if corrected else scores
        own, other = (by.gather(1, each.experts.long()) for each in (found, want))
        torch.testing.assert_close(own, other)


def test_weights_of_a_choice_are_float32_whatever_the_default() -> None:
    """The kernel writes fp32: torch's default dtype, of the process, may be another."""
    logits, before = torch.randn(9, 8), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert route(logits[:0], Routing(8, 2), 8).weights.dtype == torch.float32  # writes nothing
        found, want = (each(logits, Routing(8, 2), 8) for each in (route, route.oracle))
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found.weights, want.weights)
