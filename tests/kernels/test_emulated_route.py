"""Routing by its CUDA source, run on a CPU: groups of experts, ties, and numbers that are none."""

import pytest
import torch
from fixtures.kernels.checking import same_bits
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import drawn_scores, grouped_routing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream.kernels.experts.route import choose, placed, route
from slipstream.kernels.experts.spec import Routing, Score
from torch import Tensor

SEEDS = st.integers(0, 2**31 - 1)
SCORES = st.sampled_from([Score.SOFTMAX, Score.SIGMOID])
DRAWN = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(logits: Tensor, routing: Routing, correction: Tensor | None) -> None:
    """Compare choice, places and tiles with the oracle's to the bit, weights within rounding."""
    found = route.launcher(logits, routing, 8, correction)
    experts, weights = choose(logits.float(), routing, correction)
    assert torch.equal(found.experts.long(), experts)
    torch.testing.assert_close(found.weights, weights, atol=1e-6, rtol=1e-5, equal_nan=True)
    expected = placed(experts, weights, routing.num_experts, 8)
    for name in ("order", "offsets", "tiles"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.rest
@DRAWN
@given(SEEDS, SCORES, st.booleans(), st.sampled_from([1, 3, 17]), st.booleans())
def test_groups(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    score: Score,
    ties: bool,
    num_rows: int,
    corrected: bool,
) -> None:
    """Up to 32 experts, in rows of a wider matrix; by one CTA, or by one for four rows."""
    emulate(monkeypatch)
    routing = grouped_routing(seed, score, most=32)
    logits = drawn_scores(num_rows, routing.num_experts, seed, ties)
    correction = drawn_scores(1, routing.num_experts, seed)[0] * 0.2 if corrected else None
    check(logits, routing, correction)


@pytest.mark.rest
@pytest.mark.parametrize(
    "routing",
    [
        Routing(256, 8, Score.SIGMOID, True, 2.5, groups=8, top_groups=4),
        Routing(160, 6, factor=16.0, groups=8, top_groups=3),
        Routing(512, 16, Score.SIGMOID, groups=64, top_groups=7),
        Routing(320, 16, groups=64, top_groups=40),
        Routing(96, 5),
        Routing(64, 6, normalises=True),
    ],
    ids=str,
)
def test_many_experts(routing: Routing, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    dtype = torch.float16 if routing.num_experts == 160 else torch.bfloat16
    correction = None
    if routing.score is Score.SIGMOID or routing.normalises:
        correction = torch.linspace(-1, 1, routing.num_experts) ** 3
    for num_rows in (3, 130 // routing.top_k):
        logits = drawn_scores(num_rows, routing.num_experts, num_rows, ties=True).to(dtype)
        check(logits, routing, correction if num_rows == 3 else None)


@pytest.mark.rest
@DRAWN
@given(SEEDS, SCORES)
def test_what_is_no_number_stays_in_its_row(
    monkeypatch: pytest.MonkeyPatch, seed: int, score: Score
) -> None:
    """NaN of all bits and infinities change no other row, and choose experts that there are."""
    emulate(monkeypatch)
    routing = grouped_routing(seed, score, most=32)
    logits = drawn_scores(6, routing.num_experts, seed)
    whole = route.launcher(logits, routing, 8)
    spoilt = logits.clone()
    spoilt[1] = torch.full_like(spoilt[1].int(), -1).view(torch.float32)  # NaN, all bits set
    spoilt[2, seed % routing.num_experts] = float("nan")
    spoilt[3, seed % routing.num_experts] = float("inf")
    spoilt[4] = float("-inf")
    found = route.launcher(spoilt, routing, 8)
    for row in (0, 5):
        assert torch.equal(found.experts[row], whole.experts[row])
        assert same_bits(found.weights[row], whole.weights[row])
    for chosen in found.experts.tolist():
        assert len({*chosen}) == routing.top_k
        assert {*chosen} <= {*range(routing.num_experts)}
    assert sorted(found.order.tolist()) == list(range(6 * routing.top_k))


def test_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bits are those it has beside any other rows, at any place."""
    emulate(monkeypatch)
    routing = grouped_routing(5, Score.SIGMOID, most=32)
    logits = drawn_scores(40, routing.num_experts, 5, ties=True)
    check(logits, routing, None)
    whole = route.launcher(logits, routing, 8)
    for kept in ([7], [39, 7, 0], list(range(3, 40, 2))):
        found = route.launcher(logits[kept], routing, 8)
        assert torch.equal(found.experts, whole.experts[kept])
        assert same_bits(found.weights, whole.weights[kept])
