"""Sampling and the start of a step on the processor, beside their oracles."""

import numpy as np
import pytest
import torch
from fixtures.kernels.instruction_sets import HERE, forms, within
from fixtures.kernels.sampling import draw_rows, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.cpu.native import library
from slipstream.kernels.runtime.registry import CPU
from slipstream.kernels.sampling.narrow import narrow
from slipstream.kernels.sampling.sample import EDIT, MAX_COUNT, ROW, sample
from slipstream.kernels.staging.stage import start_step
from torch import Tensor

if library() is None:
    pytest.skip("this machine has no C++ compiler or no AVX2", allow_module_level=True)

KINDS = ("normal", "peaked", "ties", "equal", "outlier", "masked", "negative", "broken")


def logits_of(kind: str, count: int, size: int, seed: int) -> Tensor:
    """Rows of logits of a kind."""
    normal = torch.randn((count, size), generator=torch.Generator().manual_seed(seed))
    made = {
        "peaked": normal * 20,
        "ties": (normal * 2).round() / 2,
        "equal": torch.full_like(normal, -1.5),
        "negative": -normal.abs() - 100,
    }.get(kind, normal * 3)
    if kind == "outlier":
        made[:, size // 2] = 1e30
    if kind == "masked":
        made[:, ::3] = -torch.inf
        made[:, -1] = 0.5
    if kind == "broken":
        made[0, size - 1] = torch.nan
        made[-1, size // 2] = torch.inf
        made[count // 2] = -torch.inf
    return made


def rows_of(count: int, seed: int) -> Tensor:
    """Parameters of rows: some greedy, most with filters, some with penalties."""
    rng = np.random.default_rng(seed)
    return make_rows(
        count,
        temperature=rng.choice([0.0, 1e-39, 0.01, 0.7, 1.0, 5.0], count),
        top_k=rng.choice([0, 0, 1, 7, 100, 1_000_000], count),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.5, 0.8, 0.95, 0.999], count),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.1, 1.0], count),
        repetition=rng.choice([1.0, 1.0, 0.5, 1.3], count),
        presence=rng.choice([0.0, 0.0, 0.75, -0.5], count),
        frequency=rng.choice([0.0, 0.0, 0.25], count),
        typical_p=rng.choice([1.0, 1.0, 0.7], count),
        slot=rng.permutation(count),
        seed=rng.integers(-(2**62), 2**62, count),
        number=rng.integers(0, 5000, count),
    )


def edits_of(rows: Tensor, size: int, seed: int) -> Tensor:
    """Edits of every third row, by rising token id."""
    rng = np.random.default_rng(seed)
    records, parts, total = rows.numpy().view(ROW)[:, 0], [np.zeros(0, EDIT)], 0
    for n in range(0, len(records), 3):
        edits = np.zeros(int(rng.integers(1, size + 1)), EDIT)
        edits["token_id"] = np.sort(rng.permutation(size)[: len(edits)])
        edits["addend"] = rng.choice([-np.inf, 2.5, -1.25, 0.1], len(edits), p=[0.2, 0.3, 0.3, 0.2])
        edits["addend"][0] = 1.0
        records["first_edit"][n], records["end_edit"][n] = total, total + len(edits)
        parts.append(edits)
        total += len(edits)
    return torch.from_numpy(np.concatenate(parts).view(np.int32).reshape(-1, 2))


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 9),
    st.integers(1, 40) | st.sampled_from([1009, 4096]),
    st.integers(0, 1 << 16),
    *(forms, forms),
)
def test_it_samples_what_the_oracle_does(
    kind: str, count: int, size: int, seed: int, form: str, other: str
) -> None:
    """Tokens, counts and outcomes; a row has the same bits alone, and by any instruction set."""
    logits, rows = logits_of(kind, count, size, seed), rows_of(count, seed)
    edits = edits_of(rows, size, seed)
    states = np.random.default_rng(seed).choice([0, 0, 1, 4, MAX_COUNT, -0x8000], (count, size))
    counts = torch.from_numpy(states.astype(np.int16))
    rows.numpy().view(ROW)["result"][seed % 5 :: 5] = -1  # padding
    narrow(logits, rows, edits, counts)
    want_counts, own, again = counts.clone(), counts.clone(), counts.clone()
    want = draw_rows(logits, rows, edits, want_counts, is_reference=True)
    with within(form):
        got = draw_rows(logits, rows, edits, own)
        alone = draw_rows(logits[-1:], as_first(rows[-1:]), edits, counts.clone())
    with within(other):
        same = draw_rows(logits, rows, edits, again)
    for name in ("token_ids", "log_probs", "outcomes"):
        assert torch.equal(bits_of(getattr(got, name)), bits_of(getattr(same, name))), name
        if rows.numpy().view(ROW)["result"][-1] >= 0:
            last = bits_of(getattr(got, name))[-1:]
            assert torch.equal(bits_of(getattr(alone, name)), last), name
    assert torch.equal(own, again)
    assert torch.equal(got.outcomes, want.outcomes)
    assert torch.equal(got.token_ids, want.token_ids)
    assert torch.equal(own, want_counts)
    assert torch.allclose(got.log_probs, want.log_probs, rtol=5e-6, atol=5e-6, equal_nan=True)


def as_first(row: Tensor) -> Tensor:
    """A row with the first result; padding stays so."""
    made = row.clone()
    records = made.numpy().view(ROW)
    records["result"] = np.minimum(records["result"], 0)
    return made


def bits_of(x: Tensor) -> Tensor:
    """Numbers that are equal where bits are."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def test_the_kernels_are_chosen_for_logits_of_fp32_alone() -> None:
    spec = ((torch.Size([2, 9]), torch.float32, torch.device("cpu")),)
    found = sample.implementations.choose(spec, CPU)
    assert found is not None
    assert found.implementation.name == "C++"
    half = ((torch.Size([2, 9]), torch.bfloat16, torch.device("cpu")),)
    other = sample.implementations.choose(half, CPU)
    assert other is not None
    assert other.implementation.name == "torch"


@pytest.mark.parametrize("form", HERE)
def test_draws_of_a_large_vocabulary_follow_the_softmax(form: str) -> None:
    """Random numbers are made for few tokens alone; that must not favour any."""
    logits = torch.zeros(1, 3000)
    logits[0, 1234] = np.log(3000.0)  # half of the mass
    rows = make_rows(2000, number=np.arange(2000), seed=9)
    with within(form):
        tokens = draw_rows(logits.expand(2000, -1), rows).token_ids
    share = float((tokens == 1234).float().mean())
    assert 0.45 < share < 0.55
    others = tokens[tokens != 1234]
    assert 0.4 < float((others < 1500).float().mean()) < 0.6


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 6), st.integers(0, 5), st.integers(0, 1 << 16))
def test_a_step_starts_as_by_the_oracle(n: int, count: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    header = torch.tensor([4, width, count], dtype=torch.int32)
    staged, sources = random(99, 4 + count * width), random(9, n) - 3
    sampled, tokens = random(999, 9).long(), random(999, n).long()
    tables = random(9, count + 2, width + 3)
    made = [tokens.clone(), tables.clone()]
    start_step(header, staged, made[0], sources, sampled, made[1])
    start_step.oracle(header, staged, tokens, sources, sampled, tables)
    assert torch.equal(made[0], tokens)
    assert torch.equal(made[1], tables)


def test_top_p_is_a_share_of_all_that_top_k_keeps() -> None:
    """Whatever min-p leaves out of it."""
    logits = torch.tensor([[0.5, 0.3, 0.2, 1e-9]]).log().expand(100, -1)
    rows = make_rows(100, top_k=3, top_p=0.55, min_p=0.5, number=np.arange(100))
    assert set(draw_rows(logits, rows).token_ids.tolist()) == {0, 1}
