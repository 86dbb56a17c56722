"""Sampling's reference: Philox vectors, what top-k, top-p and min-p keep; chi-square of draws."""

import math

import pytest
import torch
from fixtures.kernels.sampling import Drawn, draw_rows, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.edits import EDIT
from slipstream.kernels.sampling.sample import MAX_COUNT, ROW, count_tokens, philox
from slipstream.runner.sampling_rows import history_arrays, pack_row, sampling_arrays
from slipstream_contract.sampling import SamplingParams

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
    rows = make_rows(
        count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        number=torch.arange(count),
    )
    return draw_rows(logits.expand(count, -1), rows).token_ids


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
    rows = make_rows(16, top_k=20, top_p=0.9, min_p=0.01, seed=torch.arange(16), number=1)
    together = draw_rows(logits, rows)
    for n in range(16):
        alone = draw_rows(logits[n : n + 1], make_alone(rows, n))
        assert int(alone.token_ids[0]) == int(together.token_ids[n])
        assert float(alone.log_probs[0]) == pytest.approx(float(together.log_probs[n]), abs=1e-6)


def make_alone(rows: torch.Tensor, n: int) -> torch.Tensor:
    alone = rows[n : n + 1].clone()
    alone.numpy().view(ROW)["result"] = 0
    return alone


def test_log_probs_are_of_the_logits_as_given() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    drawn = draw_rows(logits, make_rows(1, temperature=5, top_k=1))
    assert int(drawn.token_ids[0]) == 3
    exact = float(logits.double().log_softmax(-1)[0, 3])
    assert float(drawn.log_probs[0]) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_are_told(temperature: float) -> None:
    logits = torch.zeros(5, 7)
    logits[0, 6] = math.nan
    logits[1] = -math.inf
    logits[2, 3] = math.inf
    logits[3, :6] = -math.inf
    drawn = draw_rows(logits, make_rows(5, temperature=temperature))
    assert drawn.outcomes.tolist() == [False, False, False, True, True]
    assert drawn.token_ids[:4].tolist() == [0, 0, 0, 6]


def test_results_go_where_rows_say_and_padding_nowhere() -> None:
    logits = torch.eye(4)
    rows = make_rows(4, temperature=0, result=torch.tensor([2, -1, 0, 4]))
    drawn = Drawn.empty(5)
    draw_rows(logits, rows, into=drawn)
    assert drawn.token_ids.tolist() == [2, -7, 0, -7, 3]
    assert drawn.outcomes.tolist() == [True, False, True, False, True]


small = st.integers(0, 8)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=9, max_size=9),
    st.lists(small, max_size=6),
    st.lists(small, max_size=9),
    st.sampled_from([1.0, 1.3, 0.5]),
    st.sampled_from([0.0, 0.75, -0.25]),
    st.sampled_from([0.0, 0.5]),
    st.dictionaries(small, st.sampled_from([1.5, -2.0, -math.inf]), max_size=4),
)
def test_penalties_and_edits_against_the_definition(
    halves: list[int],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    edits: dict[int, float],
) -> None:
    """Two tokens are drawn one after the other; the second knows of the first."""
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    logits = torch.tensor([[0.0] * 9, [x / 2 for x in halves]])
    counts = torch.full((3, 9), -1, dtype=torch.int16)
    arrays = history_arrays([(2, prompt + output, len(prompt)), (0, [], 0)])
    count_tokens(counts, *map(torch.from_numpy, arrays))
    packed = b"".join(EDIT.pack(*edit) for edit in sorted(edits.items()))
    plain, history = pack_row(SamplingParams(max_tokens=9), 5, 1), list(output)
    for _ in range(2):
        want = []
        for token_id, logit in enumerate(logits[1].tolist()):
            logit += edits.get(token_id, 0.0)
            if token_id in prompt + history:
                logit = logit / repetition if logit > 0 else logit * repetition
            if count := history.count(token_id):
                logit -= presence + frequency * count
            want.append(logit)
        numbers = [0, len(history)]
        arrays = sampling_arrays([plain, pack_row(sampling, 3, 2)], numbers, [b"", packed])
        rows, edit_words = (torch.from_numpy(array.copy()) for array in arrays)
        drawn = draw_rows(logits, rows, edit_words, counts)
        token_id = int(drawn.token_ids[1])
        assert want[token_id] == pytest.approx(max(want), abs=1e-5)
        exact = torch.tensor(want, dtype=torch.float64).log_softmax(-1)[token_id]
        assert float(drawn.log_probs[1]) == pytest.approx(float(exact), abs=1e-5)
        history.append(token_id)
    uses_counts = (repetition, presence, frequency) != (1.0, 0.0, 0.0)
    for token_id in range(9):
        counted = history if uses_counts else output
        state = int(counts[2, token_id])
        assert state & MAX_COUNT == counted.count(token_id)
        assert (state < 0) == (token_id in prompt)
    assert counts[0].tolist() == [0] * 9
    assert counts[1].tolist() == [-1] * 9, "a row without penalties leaves the counts alone"


def test_counts_saturate() -> None:
    counts = torch.zeros((1, 3), dtype=torch.int16)
    history = [1, *[2] * 40_000]
    count_tokens(counts, *map(torch.from_numpy, history_arrays([(0, history, 1)])))
    assert counts.tolist() == [[0, -MAX_COUNT - 1, MAX_COUNT]]
    counts[0, 1] = -2  # in the prompt, and one below the most
    for expected in (-1, -1):
        rows = make_rows(1, temperature=0, frequency=0.0, presence=0.5, slot=0)
        draw_rows(torch.tensor([[0.0, 9.0, 0.0]]), rows, counts=counts)
        assert counts.tolist() == [[0, expected, MAX_COUNT]]
