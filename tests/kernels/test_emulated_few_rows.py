"""Layers of experts of a few rows, by their CUDA sources run on a CPU, against their oracles."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import Sizes, grouped_routing, make_case
from fixtures.tiers import quick_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream.kernels.experts.combine import Shared
from slipstream.kernels.experts.down_add import down_add, warps_of_tile
from slipstream.kernels.experts.route import choose, placed
from slipstream.kernels.experts.router import RouterStages, choose_rows
from slipstream.kernels.experts.spec import Routing, Score
from slipstream.kernels.runtime import jit
from torch import Tensor

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
DRAWN = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check_choice(
    num_rows: int,
    width: int,
    routing: Routing,
    dtype: torch.dtype = torch.bfloat16,
    more: int = 0,
    plus_one: bool = False,
    biased: bool = False,
    corrected: bool = False,
) -> None:
    """Norm and outputs are the oracle's within a rounding; the choice is exact of the outputs."""
    generator = torch.Generator().manual_seed(num_rows)
    experts = routing.num_experts
    columns = -(-(experts + more) // 8) * 8

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = (random(num_rows, width + 8) * 3).to(dtype)[:, :width]
    weight = (random(columns, width) * width**-0.5).to(dtype)
    norm = (1 + random(width) * 0.1).to(dtype)
    bias = random(columns).to(dtype) if biased else None
    correction = random(experts) * 0.2 if corrected else None
    stages = RouterStages(1e-5, routing, 8, bias, correction, plus_one)
    assert choose_rows.launcher(x, weight, norm, stages).outputs is None
    stages = stages._replace(keeps_outputs=True)
    found = choose_rows.launcher(x, weight, norm, stages)
    expected = choose_rows.oracle(x.float(), weight.float(), norm.float(), stages)
    bound = ROUNDING[dtype]
    torch.testing.assert_close(found.x.float(), expected.x, rtol=bound, atol=1e-6)
    exact = found.x.float() @ weight.float().T + (0 if bias is None else bias.float())
    torch.testing.assert_close(found.outputs.float(), exact, rtol=bound, atol=1e-4)
    chosen, weights = choose(found.outputs[:, :experts].float(), routing, correction)
    assert torch.equal(found.routed.experts.long(), chosen)
    torch.testing.assert_close(found.routed.weights, weights, atol=1e-6, rtol=1e-5)
    expected_places = placed(chosen, weights, experts, 8)
    for name in ("order", "offsets", "tiles"):
        assert torch.equal(getattr(found.routed, name), getattr(expected_places, name)), name


def test_a_row_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate of the shared expert behind the experts; chunks that end within the width."""
    emulate(monkeypatch)
    check_choice(1, 2504, Routing(20, 4, normalises=True), more=1, biased=True)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("num_rows", "width", "routing"),
    [
        (1, 2048, Routing(128, 8, normalises=True)),
        (8, 1000, Routing(60, 4)),
        (5, 520, Routing(8, 2, normalises=True)),
        (8, 64, Routing(512, 32, Score.SIGMOID, True, 2.5)),
        (3, 256, Routing(16, 2, Score.SPARSEMIXER, jitter=0.01)),
        (2, 4096, Routing(256, 8, Score.SIGMOID, True, 2.5, groups=8, top_groups=4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_choose(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, width: int, routing: Routing, dtype: torch.dtype
) -> None:
    emulate(monkeypatch)
    is_corrected = routing.score is Score.SIGMOID
    more, plus_one = int(num_rows > 4), num_rows == 3
    check_choice(num_rows, width, routing, dtype, more, plus_one, num_rows == 5, is_corrected)


@pytest.mark.rest
@DRAWN
@given(st.sampled_from([1, 6]), st.sampled_from([72, 1024]), st.integers(0, 2**31 - 1))
def test_drawn_groups(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, width: int, seed: int
) -> None:
    emulate(monkeypatch)
    score = Score.SIGMOID if seed % 2 else Score.SOFTMAX
    check_choice(num_rows, width, grouped_routing(seed, score, most=32), corrected=seed % 3 > 0)


def check_sums(num_rows: int, sizes: Sizes, fp8: bool, seed: int, dtype: torch.dtype) -> None:
    """Sums are the oracle's in fp32 within a rounding: alone, and with what is shared."""
    case = make_case(num_rows, sizes, dtype, fp8, bias=seed % 2 == 0, seed=seed)
    routed = case.routed(8)
    inner = make_case(num_rows * sizes.top_k, Sizes(1, 1, sizes.inner, 8), dtype).x
    shared, residual = case.x.flip(1).contiguous(), (case.x * 2).to(dtype)
    gate = make_case(num_rows, Sizes(1, 1, 9, 8), dtype).x[:, 8:]
    for beside in (None, Shared(shared), Shared(shared, gate)):
        how = (case.down, routed, beside)
        out = residual.clone()
        assert down_add.launcher(inner, case.down.values, out, *how) is out
        expected = down_add.oracle(inner, case.down.values, residual.float(), *how)
        torch.testing.assert_close(out.float(), expected, rtol=ROUNDING[dtype], atol=2e-4)


SUMS = [
    (1, Sizes(16, 8, 64, 336)),  # two warps an expert, of eight
    (1, Sizes(5, 2, 40, 144)),  # the last CTA has eight outputs
    (8, Sizes(6, 3, 72, 96)),
    (8, Sizes(64, 32, 16, 32)),
    (2, Sizes(40, 10, 32, 1008)),
    (4, Sizes(1, 1, 24, 2064)),
]


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize("of", quick_of(SUMS, SUMS[:1]), ids=str)
@pytest.mark.parametrize("warps", quick_of([16, 8], [16]))
def test_sums(
    monkeypatch: pytest.MonkeyPatch, warps: int, of: tuple[int, Sizes], fp8: bool
) -> None:
    emulate(monkeypatch)
    num_rows, sizes = of
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 132 if warps == 16 else 0)
    dtype = torch.float16 if num_rows == 2 else torch.bfloat16
    check_sums(num_rows, sizes, fp8, num_rows, dtype)


@pytest.mark.parametrize(
    ("num_tiles", "num_pairs", "num_chunks", "warps", "expected"),
    [
        (8, 8, 12, 16, 2),
        (8, 8, 12, 8, 1),
        (2, 2, 224, 16, 8),
        (2, 2, 224, 8, 4),
        (10, 10, 12, 16, 1),
        (1, 1, 1, 16, 1),
        (1, 1, 400, 16, 16),
        (64, 256, 8, 16, 1),
    ],
)
def test_no_more_warps_idle_than_must(
    num_tiles: int, num_pairs: int, num_chunks: int, warps: int, expected: int
) -> None:
    assert warps_of_tile(num_tiles, num_pairs, num_chunks, warps) == expected
