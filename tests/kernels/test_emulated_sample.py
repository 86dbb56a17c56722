"""Draws by their CUDA source, run on a CPU: the reference's, but where scores or borders differ by
rounding.
"""

import numpy as np
import pytest
import torch
from fixtures.kernels.checking import Judge, same_bits, short
from fixtures.kernels.emulation import emulate
from fixtures.kernels.sample_cases import (
    PARAMETERS,
    column,
    distributions,
    is_allowed,
    mixed_counts,
    mixed_edits,
    mixed_rows,
    parameter_rows,
)
from fixtures.kernels.sampling import Drawn, draw_rows, make_rows
from slipstream.kernels.runtime import jit
from slipstream.kernels.sampling.sample import EDIT, MAX_COUNT, ROW, edited_logits, philox
from torch import Tensor

pytestmark = pytest.mark.rest  # a compiler's second, before anything runs

# (repetition, presence, frequency): that only lower logits, and that raise some.
PENALTIES = [
    (1.3, 0.0, 0.0),
    (1.0, 0.75, 0.25),
    (1.3, 0.75, 0.25),
    (0.4, 0.0, 0.0),
    (1.0, -6.0, 0.0),
    (1.2, 0.5, -3.0),
    (3.0, -4.0, 1.0),
]
COLUMNS = ("temperature", "top_k", "top_p", "min_p")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def noise_of(rows: Tensor, size: int) -> Tensor:
    bits = philox(column(rows, "seed"), column(rows, "number"), size)
    return -torch.log(-torch.log(((bits >> 9).double() + 0.5) * 2.0**-23))


def check(
    judge: Judge,
    logits: Tensor,
    rows: Tensor,
    edits: Tensor | None = None,
    counts: Tensor | None = None,
) -> Drawn:
    """Hold a launch against the oracle: tokens, log probs and what was counted."""
    size = logits.shape[1]
    none = torch.zeros((0, size), dtype=torch.int16)
    found, want = (none if counts is None else counts.clone() for _ in range(2))
    drawn = draw_rows(logits, rows, edits, found, is_launched=True)
    expected = draw_rows(logits, rows, edits, want, is_reference=True)
    judge.true("outcomes", same_bits(drawn.outcomes, expected.outcomes))
    none_edits = torch.zeros((0, 2), dtype=torch.int32)
    edited = edited_logits(
        logits, rows, none_edits if edits is None else edits, none if counts is None else counts
    )
    exact, noise = edited.double().log_softmax(-1), noise_of(rows, size)
    records = rows.numpy().view(ROW)[:, 0]
    tokens = drawn.token_ids.tolist()
    for n, (token, other) in enumerate(zip(tokens, expected.token_ids.tolist(), strict=True)):
        if not expected.outcomes[n]:
            judge.true(f"row {n}: {token}", token == 0 and bool(drawn.log_probs[n].isnan()))
            continue
        how = tuple(records[n][name].item() for name in COLUMNS)
        is_right = token == other or (
            0 <= token < size and is_allowed(edited[n], how, noise[n], token)
        )
        judge.true(f"row {n} {how}: {token}, reference {other}", is_right)
        if is_right:
            error = abs(float(drawn.log_probs[n]) - float(exact[n, token]))
            judge.true(
                f"log prob of row {n}: {error:.1e}", error < 1e-5 * (1 + abs(exact[n, token]))
            )
    equal = drawn.token_ids == expected.token_ids
    share = float(equal.float().mean())
    judge.true(f"only {share:.1%} equal the reference", share > 0.94)
    if counts is not None:
        slots = column(rows, "slot")[equal]
        judge.true("counts", same_bits(found[slots], want[slots]))
    return drawn


def penalised_rows(penalties: list[tuple[float, float, float]], how: list[tuple]) -> Tensor:
    """A row of each penalty for each way to draw."""
    pairs = [(*p, *h) for p in penalties for h in how]
    names = ("repetition", "presence", "frequency", *COLUMNS)
    fields = dict(zip(names, map(np.array, zip(*pairs, strict=True)), strict=True))
    count = np.arange(len(pairs))
    return make_rows(len(pairs), **fields, seed=count * 0x123456789ABCDEF, number=count)


def rare_counts(rows: int, size: int) -> Tensor:
    """Counts of a tenth of the tokens, by which penalties change the order of what is low."""
    states = torch.randint(1, 4, (rows, size))
    states -= (torch.rand(rows, size) < 0.3) * (MAX_COUNT + 1)
    states *= torch.rand(rows, size) < 0.1
    return states.to(torch.int16)


def test_penalties_that_lower_and_that_raise() -> None:
    """Take one of each: by the first a floor leaves nearly all groups out; by the other it leaves
    none out, or what the penalty raises above all others would never be drawn.
    """
    judge = Judge("penalties")
    rows = penalised_rows([PENALTIES[2], (1.0, -40.0, 0.0)], [(0.8, 0, 1.0, 0.0)])
    check(judge, torch.randn(2, 2400) * 3 - 4, rows, None, rare_counts(2, 2400))
    judge.verdict()


@pytest.mark.parametrize(
    ("dtype", "shift"), zip(jit.DTYPES, (-9.0, 0.0, 9.0), strict=True), ids=str
)
def test_penalties(dtype: torch.dtype, shift: float) -> None:
    """Take penalties of both signs, on logits of both signs, by each filter and by none."""
    judge = Judge(f"penalties {short(dtype)} {shift}")
    how = [(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (0.8, 5, 0.9, 0.05), (1.0, 40, 1.0, 0.0)]
    rows = penalised_rows(PENALTIES, [*how, (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)])
    logits = torch.randn(len(rows), 2400) * 3 + shift
    logits[:, ::7] = float("-inf")
    logits[:, 1::50] = 0.0
    logits[:, 3::50] = -0.0
    check(judge, logits.to(dtype), rows, None, rare_counts(len(rows), 2400))
    judge.verdict()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, torch.bfloat16),
        (17, torch.float16),
        (1009, torch.float32),
        (4096, torch.bfloat16),
    ],
    ids=str,
)
def test_sample(size: int, dtype: torch.dtype) -> None:
    judge = Judge(f"sample {size} {short(dtype)}")
    for logits in distributions(len(PARAMETERS), size, dtype, "cpu").values():
        check(judge, logits, parameter_rows(0))
    judge.verdict()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (17, torch.bfloat16),
        (1009, torch.float32),
        (4096, torch.float16),
        (20000, torch.bfloat16),
    ],
    ids=str,
)
def test_penalties_and_edits(size: int, dtype: torch.dtype) -> None:
    """Also more tokens than are under way at once (16,384), and edits that share marks."""
    judge = Judge(f"edits {size} {short(dtype)}")
    rows = mixed_rows(40)
    edits = mixed_edits(rows, size)
    logits = (torch.randn(40, size) * 3).to(dtype)
    check(judge, logits, rows, edits, mixed_counts(40, size, "cpu"))
    judge.verdict()


def test_edits_that_raise_are_seen_in_rows_whose_penalties_lower() -> None:
    """Tokens far below every floor, but for their edits: one of these is drawn."""
    judge = Judge("raised")
    rows = penalised_rows(PENALTIES[2:3] * 4, [(0.7, 0, 1.0, 0.0)])
    edits = np.zeros(40, EDIT)
    edits["token_id"], edits["addend"] = np.arange(40) * 100 + 1, 60.0
    rows.numpy().view(ROW)["end_edit"] = 40
    logits = torch.randn(4, 4096)
    logits[:, 1:4000:100] = -30.0
    words = torch.from_numpy(edits.view(np.int32).reshape(-1, 2))
    drawn = check(judge, logits, rows, words, torch.zeros(4, 4096, dtype=torch.int16))
    assert len(set(drawn.token_ids.tolist())) > 1
    assert set((drawn.token_ids % 100).tolist()) == {1}
    judge.verdict()


@pytest.mark.parametrize(
    ("dtype", "repetition"), zip(jit.DTYPES, (1.0, 1.5, 0.5), strict=True), ids=str
)
def test_broken_rows(dtype: torch.dtype, repetition: float) -> None:
    logits = torch.randn(6, 1012).to(dtype)
    logits[0, 1008] = float("nan")
    logits[1] = float("-inf")
    logits[2, 0] = float("inf")
    logits[3, :1008] = float("-inf")
    logits[3, 1009:] = float("-inf")
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5)):
        rows = make_rows(6, temperature=temperature, top_p=top_p, top_k=5, repetition=repetition)
        drawn = draw_rows(logits, rows, counts=mixed_counts(6, 1012, "cpu"), is_launched=True)
        assert drawn.outcomes.tolist() == [0, 0, 0, 1, 1, 1]
        assert drawn.token_ids[:4].tolist() == [0, 0, 0, 1008]
        assert drawn.log_probs.isnan().tolist() == [True, True, True, False, False, False]


def test_unaligned_rows_are_the_same_rows() -> None:
    rows = mixed_rows(len(PARAMETERS))
    logits = torch.randn(len(rows), 2000)
    edits, counts = mixed_edits(rows, 1600), mixed_counts(len(rows), 1600, "cpu")
    for begin in (1, 3, 4):
        view = logits[:, begin : begin + 1600]
        one, other = counts.clone(), counts.clone()
        drawn = draw_rows(view, rows, edits, one, is_launched=True)
        want = draw_rows(view.contiguous(), rows, edits, other, is_launched=True)
        assert same_bits(drawn.token_ids, want.token_ids)
        assert same_bits(drawn.log_probs, want.log_probs)
        assert same_bits(one, other)
