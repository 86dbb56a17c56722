"""Routing and products of experts on a CPU: against another way to write them, and transformers."""

from dataclasses import replace

import pytest
import torch
from fixtures.kernels.checking import Judge, same_bits
from fixtures.kernels.expert_cases import EXPERT_FORMS, Sizes, make_case
from fixtures.kernels.packed_cases import Form, packed_pair, quantized
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.experts import packed
from slipstream.kernels.experts.combine import Shared, combine
from slipstream.kernels.experts.grouped import (
    SKINNY_ROWS,
    TILE_ROWS,
    expert_matrix,
    gate_up,
    gated,
    tile_rows,
)
from slipstream.kernels.experts.route import Routed, choose, most_tiles, route
from slipstream.kernels.experts.spec import Gate, Routing, Score
from slipstream.kernels.gemm.op import unpacked
from slipstream.kernels.gemm.packing import TILE, Packing
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import CPU, Target
from slipstream.quant.forms import form_of_experts
from slipstream.quant.matrix import Kind
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

HOPPER = Target("cuda", "sm_90a", 132)
F16 = torch.float16
PACKED_E2M1 = Packing(4, 16, 64, 64, torch.bfloat16, False, "e2m1")
seeds = st.integers(0, 2**31 - 1)


def logits_of(num_rows: int, num_experts: int, seed: int, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, num_experts, generator=generator)
    return logits.round() if ties else logits  # zeros of both signs, too


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 8), seeds, st.booleans())
def test_every_pair_has_one_place_in_one_tile(
    num_rows: int, num_experts: int, top_k: int, seed: int, ties: bool
) -> None:
    top_k = min(top_k, num_experts)
    logits = logits_of(num_rows, num_experts, seed, ties)
    for rows in (SKINNY_ROWS, *TILE_ROWS):
        routed = route(logits, Routing(num_experts, top_k), rows)
        flat = routed.experts.flatten()
        # By experts, and by pairs within one.
        keys = flat[routed.order.long()].long() * len(flat) + routed.order
        assert torch.equal(keys, keys.sort().values)
        assert sorted(routed.order.tolist()) == list(range(len(flat)))
        seen = []
        for expert, first, count, _ in routed.tiles.tolist():
            assert count <= rows
            assert routed.offsets[expert] <= first
            assert first + count <= routed.offsets[expert + 1] or count == 0
            seen += range(first, first + count)
        assert seen == list(range(len(flat)))
        assert len(routed.tiles) == most_tiles(len(flat), num_experts, rows)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(2, 70), seeds, st.booleans(), st.booleans())
def test_softmax(num_rows: int, num_experts: int, seed: int, normalises: bool, ties: bool) -> None:
    """The lower of equal logits is chosen; normalised, it is the softmax of the chosen alone."""
    logits, top_k = logits_of(num_rows, num_experts, seed, ties), min(4, num_experts)
    routing = Routing(num_experts, top_k, normalises=normalises, factor=2.5)
    experts, weights = choose(logits, routing)
    for row, found in enumerate(experts.tolist()):
        numbers = logits[row].tolist()
        assert found == sorted(range(num_experts), key=lambda e: (-numbers[e], e))[:top_k]
        scores = logits[row].double().softmax(-1)[experts[row]]
        if normalises:
            scores = logits[row][experts[row]].double().softmax(-1)
        torch.testing.assert_close(weights[row].double(), 2.5 * scores, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("score", [Score.SIGMOID, Score.SOFTMAX])
def test_corrections(score: Score, normalises: bool) -> None:
    """A correction moves the choice, not the weight."""
    logits, correction = logits_of(50, 16, 0), torch.linspace(-1, 1, 16)
    routing = Routing(16, 4, score, normalises)
    experts, weights = choose(logits, routing, correction)
    scores = logits.sigmoid() if score is Score.SIGMOID else logits.softmax(-1)
    assert torch.equal(experts, (scores + correction).topk(4).indices)
    assert not torch.equal(experts, scores.topk(4).indices)
    expected = scores.gather(1, experts)
    if normalises:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([Score.SOFTMAX, Score.SIGMOID]), st.integers(1, 4), st.booleans())
def test_groups_are_chosen_first(seed: int, score: Score, top_groups: int, ties: bool) -> None:
    """As a loop over rows has it: the best groups, then the best of their experts."""
    logits, correction = logits_of(20, 16, seed, ties), torch.linspace(-0.3, 0.3, 16)
    routing = Routing(16, 3, score, groups=4, top_groups=top_groups)
    own = correction if score is Score.SIGMOID else None
    experts, _ = choose(logits, routing, own)
    for row, chosen in zip(logits, experts.tolist(), strict=True):
        by = row if own is None else row.sigmoid() + own
        best = [
            sorted(by[i * 4 : i * 4 + 4].tolist())[-1 if own is None else -2 :] for i in range(4)
        ]
        groups = sorted(range(4), key=lambda i: (-torch.tensor(best[i]).sum().item(), i))
        inside = [e for e in range(16) if e // 4 in groups[:top_groups]]
        assert chosen == sorted(inside, key=lambda e: (-by[e].item(), e))[:3]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), seeds, st.sampled_from([0.01, 0.1, 0.4]), st.booleans())
def test_the_sparse_mixer_is_that_of_transformers(
    num_experts: int, seed: int, jitter: float, ties: bool
) -> None:
    logits = logits_of(30, num_experts, seed, ties) + 0.25
    experts, weights = choose(logits, Routing(num_experts, 2, Score.SPARSEMIXER, jitter=jitter))
    multiplier, selected = sparsemixer(logits, jitter, training=False)
    assert torch.equal(experts, selected)
    torch.testing.assert_close(weights, multiplier)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(list(Gate)),
    st.booleans(),
    seeds,
)
def test_the_sum_of_a_rows_experts(
    num_rows: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    gate: Gate,
    fp8: bool,
    seed: int,
) -> None:
    sizes = Sizes(num_experts, min(top_k, num_experts), hidden, inner)
    case = make_case(num_rows, sizes, dtype, fp8, bias=True, gate=gate, seed=seed)
    residual = case.x * 0.5
    routed = case.routed(16)
    judge = Judge("experts")
    exact = case.expected(routed, residual, torch.float64)
    naive = case.expected(routed, residual, dtype)
    judge.close("sum", case.run(16, residual), exact, naive)
    judge.verdict()


@pytest.mark.parametrize("gated", [False, True])
def test_the_shared_expert_is_added_last(gated: bool) -> None:
    residual, products, shared = torch.randn(3, 5), torch.randn(6, 5), torch.randn(3, 5)
    gate = torch.randn(3, 1) if gated else None
    out = combine(residual.clone(), products, Shared(shared, gate))
    factor = 1 if gate is None else torch.sigmoid(gate)
    expected = residual + products.view(3, 2, 5).sum(1) + shared * factor
    torch.testing.assert_close(out, expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), seeds)
def test_a_row_does_not_depend_on_its_neighbours(num_rows: int, row: int, seed: int) -> None:
    """Bit for bit, in deterministic mode; and every run gives the same bits in either mode."""
    case = make_case(40, Sizes(5, 2, 96, 72), torch.float32, seed=seed)
    residual = torch.randn_like(case.x)
    whole = case.run(16, residual, deterministic=True)
    assert same_bits(case.run(16, residual), case.run(16, residual))
    kept = torch.arange(40).roll(-row)[:num_rows]
    case.x, case.logits = case.x[kept], case.logits[kept]
    assert same_bits(case.run(16, residual[kept], deterministic=True), whole[kept])


@pytest.mark.parametrize(
    ("is_fp8", "experts", "top_k", "sizes"),
    [
        (False, 128, 8, [8, 16, 16, 16, 64]),
        (False, 8, 2, [8, 16, 16, 64, 128]),
        (True, 128, 8, [8, 8, 16, 16, 32]),
        (True, 8, 2, [8, 16, 16, 32, 64]),
    ],
)
def test_tiles_are_the_fastest_that_were_measured(
    is_fp8: bool, experts: int, top_k: int, sizes: list[int]
) -> None:
    """By benchmarks/results/2026-11-28-experts-h200.txt, within 5 %."""
    found = [tile_rows(n * top_k, experts, is_fp8) for n in (1, 8, 32, 128, 512)]
    assert found == sizes


def test_deterministic_mode_has_sums_of_one_order() -> None:
    found = {tile_rows(n, 8, is_fp8, deterministic=True) for n in range(2000) for is_fp8 in (0, 1)}
    assert found == set(TILE_ROWS)


def test_routed_names_the_experts_of_a_row() -> None:
    routed = route(torch.tensor([[1.0, 3, 2]]), Routing(3, 2), 8)
    assert isinstance(routed, Routed)
    assert routed.top_k == 2
    assert routed.experts.tolist() == [[1, 2]]
    assert routed.tiles.tolist() == [[1, 0, 1, 0], [2, 1, 1, 0]]


def test_a_step_compiles_the_tiles_of_steps_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the first prompt of some length would wait for a compiler."""
    wanted: set[jit.Variant] = set()
    monkeypatch.setattr(jit, "_put_off", wanted)
    case = make_case(3, Sizes(4, 2, 64, 32), torch.bfloat16)
    routed = case.routed(16)
    gate_up.launcher(case.x, case.gate_up.values, case.gate_up, routed, Gate.SILU)
    tiles = {dict(one.defines).get("ROWS", "8") for one in wanted}
    assert tiles == {str(rows) for rows in (SKINNY_ROWS, *TILE_ROWS)}
    assert {dict(one.defines)["GATED"] for one in wanted} == {"1"}


@pytest.mark.parametrize("form", EXPERT_FORMS, ids=str)
@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([64, 200, 256]), st.data())
def test_packed_experts_are_rows_of_all(
    form: Form, count: int, tiles: int, inputs: int, data: st.DataObject
) -> None:
    matrix, weights = packed_pair(form, count * tiles * TILE, inputs)
    experts = expert_matrix(matrix, count, None)
    assert (experts.outputs, experts.inputs) == (tiles * TILE, inputs)
    expert = data.draw(st.integers(0, count - 1))
    found, _ = experts.of(expert)
    assert matrix.groups is not None
    whole = unpacked(matrix.values, matrix.groups)
    if matrix.scales is not None:
        whole = whole * matrix.scales[:, None]
    part = slice(expert * tiles * TILE, (expert + 1) * tiles * TILE)
    assert same_bits(found, whole[part])
    torch.testing.assert_close(found, weights[part], rtol=1e-5, atol=1e-7)


def test_experts_that_begin_within_a_tile_are_not_packed() -> None:
    """Nor where gates or ups do: they are counted apart."""
    matrix = quantized(Form(Kind.W8, 32, torch.float32), 4 * 24, 64)
    for target, dtype in ((CPU, torch.float32), (HOPPER, torch.bfloat16)):
        assert form_of_experts(matrix, 3, target, dtype) is not None
        assert form_of_experts(matrix, 4, target, dtype) is None


def test_forms_of_packed_experts() -> None:
    """As kernels for rows of 16 bits take them; those of e4m3 are for linear layers alone."""
    for form in EXPERT_FORMS:
        for dtype in packed.DTYPES:
            matrix = replace(quantized(form, 96, 256), row_type="e4m3")
            found = form_of_experts(matrix, 3, HOPPER, dtype)
            assert found is not None, form
            groups = found.make(matrix).groups
            is_by_row = form.kind is Kind.F8 and form.group > 256  # which have kernels of their own
            assert (groups is None) == is_by_row
            assert groups is None or not groups.packing.takes_e4m3
    ordered = quantized(Form(has_order=True), 96, 256)
    assert form_of_experts(ordered, 3, HOPPER, torch.bfloat16) is None
    assert form_of_experts(quantized(Form(), 96, 256), 3, HOPPER, torch.float32) is None


def test_tiles_of_packed_experts() -> None:
    """Sizes that all kernels have of a layer: sums of groups have no tiles of 64 rows."""
    integers, floats = Packing(4, 32, 64, 64, F16, False), PACKED_E2M1
    for num_rows, packings, rows in (
        (1, (integers,), 8),
        (64, (integers,), 8),
        (100, (integers, None), 16),
        (4096, (integers, integers), 32),
        (4096, (integers, floats), 32),
        (4096, (floats, floats), 64),
        (4096, (None, floats), 64),
    ):
        packings = [each for each in packings if each is not None]
        assert tile_rows(8 * num_rows, 128, packings=packings) == rows
        found = tile_rows(8 * num_rows, 128, deterministic=True, packings=packings)
        assert found == max(16, rows)
        for each in packings:
            assert rows in packed.tile_rows(each)


def test_what_no_kernel_of_packed_experts_takes() -> None:
    x, integers = torch.zeros(3, 64, dtype=torch.bfloat16), Packing(4, 32, 64, 64, F16, False)
    packed.check("down", x, integers, 1)
    for rows, packing, streams, why in (
        (x.float(), integers, 1, "16 bits, not torch.float32"),
        (x, integers._replace(for_e4m3=True), 1, "packed for e4m3"),
        (x, integers._replace(layout="tiles"), 1, "weights are 4 bits"),
        (x.half(), PACKED_E2M1, 1, "scales of e2m1 are torch.bfloat16"),
        (x[:, :56], integers, 1, "56 inputs, not 64"),
        (x[:, :60], integers._replace(inputs=60), 1, "60 is not a multiple of 8"),
        (x, integers._replace(outputs=48), 2, "48 rows of weights are no whole tiles"),
        (x[:, 1:57], integers._replace(inputs=56), 1, "rows are not aligned"),
    ):
        with pytest.raises(KernelError, match=why):
            packed.check("down", rows, packing, streams)


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("width", [24, 720])
def test_gated_values_do_not_depend_on_how_many_there_are(gate: Gate, width: int) -> None:
    rows = torch.randn(40, 2 * width, generator=torch.Generator().manual_seed(width)) * 3
    whole = gated(rows, gate)
    for count in (1, 2, 3, 7, 39):
        for first in range(40 - count):
            assert torch.equal(
                gated(rows[first : first + count].clone(), gate), whole[first : first + count]
            )
    gates, ups = rows.double().chunk(2, -1)
    if gate is Gate.SILU:
        wanted = torch.nn.functional.silu(gates) * ups
    else:
        gates = gates.clamp(max=7)
        wanted = gates * torch.sigmoid(1.702 * gates) * (ups.clamp(-7, 7) + 1)
    assert (whole - wanted).abs().max() < 1e-5
    far = torch.tensor([[-1e4, 1e4, 2.0, 3.0]])
    assert gated(far, gate).isfinite().all()
