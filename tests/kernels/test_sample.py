"""Sampling's reference: Philox vectors, what top-k, top-p and min-p keep; chi-square of draws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.sample import edit_logits, philox, sample

MASK = 0xFFFFFFFF


def philox_4x32_10(counter: list[int], key: list[int]) -> list[int]:
    """The generator of Salmon et al. (2011), in plain integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & MASK,
            (first >> 32) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


# Known answers of the Random123 distribution.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox_4x32_10(counter, key) == words


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_philox(seed: int, counter: int, num_tokens: int) -> None:
    words = philox(torch.tensor([seed]), torch.tensor([counter]), num_tokens)[0].tolist()
    key = [seed & MASK, (seed >> 32) & MASK]
    for token, word in enumerate(words):
        assert word == philox_4x32_10([token // 4, counter, 0, 0], key)[token % 4]
    assert len(words) == num_tokens


def test_philox_known_answer_through_the_tensor_path() -> None:
    assert philox(torch.tensor([0]), torch.tensor([0]), 4)[0].tolist() == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]


def draw(
    logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, count: int = 1
) -> torch.Tensor:
    """`count` outputs of one sequence with these logits."""
    rows = logits.expand(count, -1).contiguous()
    full = torch.full((count,), 1.0)
    return sample(
        rows,
        full * temperature,
        (full * top_k).int(),
        full * top_p,
        full * min_p,
        torch.full((count,), seed),
        torch.arange(count),
    )[0]


def kept(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids that may be drawn, by the definition: plain Python."""
    ids = range(len(logits))
    order = sorted(logits, reverse=True)
    kth = order[min(top_k or len(order), len(order)) - 1]
    inside = [i for i in ids if logits[i] >= kth]
    weights = {i: math.exp(logits[i] - order[0]) for i in inside}
    total = math.fsum(weights.values())
    result = set()
    for i in inside:
        before = math.fsum(w for j, w in weights.items() if logits[j] > logits[i]) / total
        if (before < top_p or before == 0 or top_p >= 1) and weights[i] >= min_p:
            result.add(i)
    return result


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=12),
    st.integers(0, 14),
    st.sampled_from((0.0, 0.13, 0.5, 0.77, 0.951, 1.0)),
    st.sampled_from((0.0, 0.031, 0.29, 1.0)),
    st.integers(0, 2**62),
)
def test_filters_keep_what_they_say(
    halves: list[int], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Nothing outside the kept set is drawn, and whatever is likely enough inside it is."""
    logits = torch.tensor([x / 2 for x in halves])
    allowed = kept(logits.tolist(), top_k, top_p, min_p)
    tokens = set(draw(logits, 1.0, top_k, top_p, min_p, seed, 300).tolist())
    assert tokens <= allowed
    mass = {i: math.exp(float(logits[i] - logits.max())) for i in allowed}
    total = sum(mass.values())
    assert {i for i in allowed if mass[i] / total > 0.1} <= tokens


def test_ties_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 0.0])
    assert set(draw(logits, top_k=1, count=200).tolist()) == {1, 3}
    assert set(draw(logits, top_p=0.1, count=200).tolist()) == {1, 3}
    assert set(draw(logits, top_k=3, count=2000).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 5)])
def test_draws_follow_the_softmax(temperature: float, top_k: int) -> None:
    """Chi-square over 20,000 draws; the limit is beyond the 1 - 1e-6 quantile."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9, 1.5])
    count = 20_000
    tokens = draw(logits, temperature, top_k, seed=1234, count=count)
    scaled = logits.double() / temperature
    if top_k:
        scaled[scaled < scaled.sort(descending=True).values[top_k - 1]] = -math.inf
    expected = scaled.softmax(-1) * count
    observed = torch.bincount(tokens, minlength=len(logits)).double()
    inside = expected > 0
    assert int(observed[~inside].sum()) == 0
    statistic = float(((observed - expected)[inside].pow(2) / expected[inside]).sum())
    degrees = int(inside.sum()) - 1
    assert statistic < degrees + 7 * math.sqrt(2 * degrees) + 10


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
@settings(deadline=None)
def test_greedy_takes_the_lowest_id_of_the_highest(values: list[int]) -> None:
    logits = torch.tensor([float(v) for v in values])
    assert int(draw(logits, temperature=0.0)) == values.index(max(values))
    assert int(draw(logits, temperature=1e-45)) == values.index(max(values)) or max(values) <= 0


def test_a_row_draws_the_same_among_any_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 257)
    full = torch.ones(16)
    args = (logits, full, full.int() * 20, full * 0.9, full * 0.01, torch.arange(16), full.long())
    tokens, log_probs, _ = sample(*args)
    for n in range(16):
        token, log_prob, _ = sample(*(arg[n : n + 1] for arg in args))
        assert int(token) == int(tokens[n])
        assert float(log_prob) == pytest.approx(float(log_probs[n]), abs=1e-6)


def test_log_probs_are_of_the_logits_as_given() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    one = torch.ones(1)
    token, log_prob, _ = sample(logits, one * 5, one.int(), one, one * 0, one.long(), one.long())
    assert int(token) == 3
    assert float(log_prob) == pytest.approx(float(logits.double().log_softmax(-1)[0, 3]), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_are_told(temperature: float) -> None:
    logits = torch.zeros(5, 7)
    logits[0, 6] = math.nan
    logits[1] = -math.inf
    logits[2, 3] = math.inf
    logits[3, :6] = -math.inf
    one = torch.ones(5)
    tokens, _, is_finite = sample(
        logits, one * temperature, one.int() * 0, one, one * 0, one.long(), one.long()
    )
    assert is_finite.tolist() == [False, False, False, True, True]
    assert int(tokens[3]) == 6


def test_edit_logits() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0], [4.0, 1.0, 1.0]])
    edit_logits(
        logits,
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([0, 1, 0, 2]),
        torch.tensor([2.0, 2.0, 1.0, 1.0]),
        torch.tensor([0.5, 0.0, -math.inf, 3.0]),
    )
    assert logits.tolist() == [[1.5, -4.0, 0.0], [-math.inf, 1.0, 4.0]]
