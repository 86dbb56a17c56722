"""Filters of few rows: what the reference keeps, against transformers and formulas of llama.cpp."""

import math

import numpy as np
import pytest
import torch
from fixtures.kernels.sampling import draw_rows, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.edits import EDIT
from slipstream.kernels.sampling.narrow import XTC_QUAD, narrow
from slipstream.kernels.sampling.sample import EDIT_WORDS, ROW, philox_words, processed_logits
from torch import Tensor

Record = np.void
NEUTRAL = {"top_p_decay": 1.0, "typical_p": 1.0, "xtc_threshold": 0.1, "dynatemp_exponent": 1.0}
NUMBER = 3  # of an output
ASKS = {
    "typical_p": (0.2, 0.6, 0.95),
    "top_n_sigma": (0.5, 1.0, 2.0),
    "epsilon_cutoff": (0.002, 0.03, 0.9),
    "eta_cutoff": (0.002, 0.03, 0.9),
    "xtc_probability": (0.5, 1.0),
    "dynatemp_range": (0.3, 5.0),
    "top_p_decay": (0.5, 0.9),
}
OTHERS = {
    "temperature": (0.5, 1.0, 1.7),
    "top_k": (0, 1, 5, 30),
    "top_p": (1.0, 0.8, 0.0),
    "top_p_min": (0.0, 0.6),
    "min_p": (0.0, 0.05, 1.0),
    "xtc_threshold": (0.0, 0.05, 0.1, 0.6),
    "dynatemp_exponent": (0.0, 1.0, 2.5),
}


def run(logits: Tensor, rows: Tensor, edits: Tensor | None = None) -> Record:
    """Narrow one row `[v]` in place and return its record."""
    if edits is None:
        edits = torch.zeros((0, EDIT_WORDS), dtype=torch.int32)
    narrow(logits[None], rows, edits, torch.zeros((0, len(logits)), dtype=torch.int16))
    return rows.numpy().view(ROW)[0, 0]


def kept_by(logits: Tensor, rows: Tensor) -> set[int]:
    """Tokens that the range of a narrowed row keeps."""
    record = run(logits, rows)
    scaled = logits / np.float32(record["heat"])
    assert int(record["likeliest"]) - 1 in range(len(logits))
    inside = (scaled >= record["low"]) & (scaled <= record["high"])
    return set(inside.nonzero()[:, 0].tolist())


def entropy(scores: np.ndarray) -> float:
    p = np.exp(scores - scores.max())
    p /= p.sum()
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def expected(logits: np.ndarray, how: dict[str, float], draws_xtc: bool) -> tuple[float, set[int]]:
    """The chain, a filter after another over all scores, in fp64: temperature and tokens kept."""
    warpers = pytest.importorskip("transformers.generation.logits_process")
    temperature = how["temperature"]
    if how["dynatemp_range"] > 0:
        share = entropy(logits) / math.log(len(logits))
        least = max(0.0, temperature - how["dynatemp_range"])
        most = temperature + how["dynatemp_range"]
        temperature = least + (most - least) * share ** how["dynatemp_exponent"]
    scores = logits / temperature
    if how["top_n_sigma"] > 0:
        scores[logits < logits.max() - how["top_n_sigma"] * logits.std()] = -np.inf
    chain = []
    if how["top_k"]:
        chain.append(warpers.TopKLogitsWarper(how["top_k"]))
    if how["typical_p"] < 1:
        chain.append(warpers.TypicalLogitsWarper(how["typical_p"]))
    top_p = how["top_p"]
    for _ in range(NUMBER if how["top_p_decay"] < 1 else 0):
        top_p = max(top_p * how["top_p_decay"], how["top_p_min"])
    if top_p < 1:
        chain.append(warpers.TopPLogitsWarper(top_p))
    if how["min_p"] > 0:
        chain.append(warpers.MinPLogitsWarper(how["min_p"]))
    if how["epsilon_cutoff"] > 0:
        chain.append(warpers.EpsilonLogitsWarper(how["epsilon_cutoff"]))
    if how["eta_cutoff"] > 0:
        chain.append(warpers.EtaLogitsWarper(how["eta_cutoff"]))
    kept = torch.from_numpy(scores)[None]
    for warper in chain:
        kept = warper(None, kept)
    scores = kept[0].numpy()
    if draws_xtc and how["xtc_threshold"] <= 0.5:
        p = np.exp(scores - scores.max())
        p /= p.sum()
        top = np.isfinite(scores) & (p >= how["xtc_threshold"])
        order = [i for i in np.argsort(-p) if top[i]]
        scores[order[:-1]] = -np.inf
    return temperature, set(np.flatnonzero(np.isfinite(scores)).tolist())


@st.composite
def filters(draw: st.DrawFn) -> dict[str, float]:
    """At least one of the filters, and any of the others."""
    asked = draw(st.sets(st.sampled_from(sorted(ASKS)), min_size=1, max_size=3))
    others = draw(st.sets(st.sampled_from(sorted(OTHERS)), max_size=3))
    plain = dict.fromkeys(ASKS, 0.0) | {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    plain["top_p_min"] = 1e-6
    chosen = {name: draw(st.sampled_from((ASKS | OTHERS)[name])) for name in sorted(asked | others)}
    return plain | NEUTRAL | chosen


@settings(max_examples=60, deadline=None)
@given(filters(), st.integers(2, 60), st.sampled_from((0.3, 2.0, 6.0)), st.integers(0, 2**31))
def test_chain(how: dict[str, float], size: int, width: float, seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, width, size)).float()
    rows = make_rows(1, **how, seed=seed, number=NUMBER)
    key = (torch.tensor([seed]), torch.tensor([NUMBER]), torch.tensor([XTC_QUAD]))
    word = int(philox_words(*key)[0, 0])
    draws_xtc = ((word >> 9) + 0.5) * 2.0**-23 < how["xtc_probability"]
    found = kept_by(logits, rows)
    temperature, want = expected(logits.double().numpy(), how, draws_xtc)
    assert rows.numpy().view(ROW)[0, 0]["heat"] == pytest.approx(temperature, rel=1e-5)
    assert found == want


@settings(max_examples=10, deadline=None)
@given(filters(), st.integers(2, 30), st.integers(0, 2**31))
def test_samples_are_of_what_is_kept(how: dict[str, float], size: int, seed: int) -> None:
    """And so are processed logits; whatever is likely enough is drawn."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, size)).float()
    count = 100
    how |= {"xtc_probability": 0.0, "top_p_decay": 1.0}  # which differ from output to output
    rows = make_rows(count, **how, seed=seed, number=np.arange(count))
    edits = torch.zeros((0, EDIT_WORDS), dtype=torch.int32)
    counts = torch.zeros((0, size), dtype=torch.int16)
    many = logits.expand(count, -1).clone()
    narrow(many, rows, edits, counts)
    assert torch.equal(many, logits.expand(count, -1)), "logits stay as they are"
    tokens = set(draw_rows(many, rows).token_ids.tolist())
    processed, temperature = processed_logits(many[:1], rows[:1], edits, counts)
    p = (processed / temperature)[0].softmax(-1)
    assert tokens <= set((p > 0).nonzero()[:, 0].tolist())
    assert set((p > 0.15).nonzero()[:, 0].tolist()) <= tokens


def test_draws_follow_the_range() -> None:
    """Chi-square of 20,000 draws of a row that has lost its likeliest token."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5])
    count = 20_000
    one = run(logits, make_rows(1, xtc_probability=1.0, xtc_threshold=0.2))
    records = np.repeat(one, count)
    records["number"] = records["result"] = np.arange(count)
    rows = torch.from_numpy(records.view(np.int32).reshape(count, -1))
    drawn = draw_rows(logits.expand(count, -1), rows)
    observed = torch.bincount(drawn.token_ids, minlength=6).double()
    assert observed[0] == 0
    want = torch.tensor([-math.inf, 1.5, 1.0, 0.5, 0.0, -0.5]).double().softmax(-1) * count
    statistic = float(((observed - want)[1:].pow(2) / want[1:]).sum())
    assert statistic < 4 + 7 * math.sqrt(8) + 10
    # Log probs are of all tokens, as before.
    own = logits.log_softmax(-1)[drawn.token_ids]
    assert torch.allclose(drawn.log_probs, own, atol=1e-6)


def test_xtc_happens_as_often_as_asked() -> None:
    count = 500
    rows = make_rows(count, xtc_probability=0.3, xtc_threshold=0.1, number=np.arange(count), seed=5)
    logits = torch.tensor([3.0, 2.0, -9.0]).expand(count, -1)
    nothing = torch.zeros((0, EDIT_WORDS), dtype=torch.int32)
    narrow(logits, rows, nothing, torch.zeros((0, 3), dtype=torch.int16))
    share = float((rows.numpy().view(ROW)["high"] < 3).mean())
    assert 0.2 < share < 0.4


def test_plain_and_greedy_rows_are_left_alone() -> None:
    logits = torch.randn(9)
    plain = make_rows(1, top_k=3, top_p=0.5, min_p=0.1)
    before = plain.clone()
    run(logits, plain)
    assert torch.equal(plain, before)
    padding = make_rows(1, epsilon_cutoff=0.9, result=-1)
    assert run(logits, padding)["likeliest"] == 0
    greedy = make_rows(1, temperature=0.0, xtc_probability=1.0, xtc_threshold=0.0)
    run(logits, greedy)
    assert draw_rows(logits[None], greedy).token_ids.tolist() == [int(logits.argmax())]


def test_edits_come_first() -> None:
    """A banned token is neither kept nor counted, and a biased one may be the likeliest."""
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0])
    edits = np.frombuffer(EDIT.pack(0, -math.inf) + EDIT.pack(3, 9.0), np.int32).reshape(-1, 2)
    rows = make_rows(1, epsilon_cutoff=0.99, first_edit=0, end_edit=2)
    record = run(logits, rows, torch.from_numpy(edits.copy()))
    assert (record["likeliest"], record["low"], record["high"]) == (4, 10.0, 10.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_left_to_the_sampler(value: float) -> None:
    rows = make_rows(1, typical_p=0.5)
    assert run(torch.tensor([1.0, value, 0.0]), rows)["likeliest"] == 0
    assert draw_rows(torch.tensor([[1.0, value, 0.0]]), rows).outcomes.tolist() == [0]


@pytest.mark.parametrize("width", [0.5, 2.0])
@pytest.mark.parametrize("name", ["typical_p", "top_n_sigma", "epsilon_cutoff", "eta_cutoff"])
def test_each_alone(name: str, width: float) -> None:
    """Each filter keeps a range of 60 tokens, many of them likely or few, at every value."""
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, width, 60)).float()
    plain = dict.fromkeys((*ASKS, *OTHERS), 0.0) | NEUTRAL | {"temperature": 1.0, "top_p": 1.0}
    for value in ASKS[name]:
        how = plain | {name: value}
        want = expected(logits.double().numpy(), how, draws_xtc=False)[1]
        assert kept_by(logits, make_rows(1, **how)) == want, value
