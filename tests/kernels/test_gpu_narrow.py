"""Ranges of filtered rows on a GPU: the reference's, but where a border differs by rounding."""

import numpy as np
import pytest
import torch
from fixtures.kernels.checking import DTYPES, Judge, same_bits, short
from fixtures.kernels.sampling import draw_rows, make_rows
from slipstream.kernels.sampling.narrow import narrow
from slipstream.kernels.sampling.sample import EDIT_WORDS, ROW
from torch import Tensor

pytestmark = pytest.mark.gpu

VOCABULARIES = (1, 5, 17, 1009, 4096, 128256, 151936)
ASKS: list[dict[str, float]] = [
    {},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 0.7},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5, "top_k": 40, "top_p": 0.9},
    {"epsilon_cutoff": 0.001},
    {"epsilon_cutoff": 0.9},
    {"eta_cutoff": 0.002, "temperature": 1.3},
    {"xtc_probability": 1.0, "xtc_threshold": 0.001},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 3},
    {"dynatemp_range": 0.5},
    {"dynatemp_range": 5.0, "dynatemp_exponent": 0.5, "min_p": 0.01},
    {"typical_p": 0.5, "top_k": 300, "top_p": 0.8, "min_p": 0.02, "eta_cutoff": 0.001},
    {"temperature": 0.0, "typical_p": 0.5},
    {"temperature": 1e-39, "epsilon_cutoff": 0.5},
    {"top_p": 0.0, "epsilon_cutoff": 0.001},
    {"top_k": 1, "typical_p": 0.9},
    {"top_p_decay": 0.99},
    {"top_p": 0.9, "top_p_decay": 0.9, "top_p_min": 0.3, "temperature": 0.8},
]
NAMES = sorted({name for ask in ASKS for name in ask})
PLAIN = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "xtc_threshold": 0.1}
PLAIN |= {"dynatemp_exponent": 1.0, "top_p_decay": 1.0}


def rows_of(asks: list[dict[str, float]], trial: int = 0) -> Tensor:
    fields = {name: [ask.get(name, PLAIN.get(name, 0.0)) for ask in asks] for name in NAMES}
    count = np.arange(len(asks))
    return make_rows(len(asks), **fields, seed=count * 12345 + trial, number=count * 7 + trial)


def run(logits: Tensor, rows: Tensor, is_reference: bool = False) -> np.ndarray:
    """Return the records after `narrow`."""
    on_device = rows.to(logits.device)
    edits = torch.zeros((0, EDIT_WORDS), dtype=torch.int32, device=logits.device)
    counts = torch.zeros((0, logits.shape[1]), dtype=torch.int16, device=logits.device)
    (narrow.oracle if is_reference else narrow)(logits, on_device, edits, counts)
    return on_device.cpu().numpy().view(ROW)[:, 0]


def distributions(rows: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(size)
    normal = torch.randn((rows, size), device="cuda")
    masked = (normal * 2).clone()
    masked[:, ::3] = float("-inf")
    masked[:, -1] = 0.5
    kinds = {
        "normal": normal * 3,
        "flat": normal * 0.1,
        "peaked": normal * 20,
        "ties": (normal * 2).round() / 2,
        "equal": torch.full_like(normal, -1.5),
        "masked": masked,
    }
    return {kind: logits.to(dtype) for kind, logits in kinds.items()}


def kept(logits: Tensor, record: np.void) -> Tensor:
    # By a tensor: torch multiplies with the reciprocal of a number, which rounds otherwise.
    scaled = logits.float() / torch.tensor(float(record["heat"]), device=logits.device)
    return (scaled >= float(record["low"])) & (scaled <= float(record["high"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", VOCABULARIES)
def test_narrow(size: int, dtype: torch.dtype) -> None:
    """The same tokens are kept, but for a mass of 1e-4 at the borders of random logits."""
    judge = Judge(f"narrow {size} {short(dtype)}")
    for kind, logits in distributions(len(ASKS), size, dtype).items():
        rows = rows_of(ASKS)
        found, want = run(logits, rows), run(logits, rows, is_reference=True)
        judge.true(
            f"{kind}: which rows", bool(((found["likeliest"] > 0) == (want["likeliest"] > 0)).all())
        )
        judge.true(f"{kind}: plain", int(found["likeliest"][0]) == 0)
        for n in np.flatnonzero(want["likeliest"]).tolist():
            heat = abs(float(found["heat"][n]) - float(want["heat"][n]))
            judge.true(f"{kind} {ASKS[n]}: heat", heat <= 1e-5 * abs(float(want["heat"][n])))
            if not 1 / float(want["heat"][n] or 1e-45) < 1e30:
                continue
            own, other = kept(logits[n], found[n]), kept(logits[n], want[n])
            p = (logits[n].double() / float(want["heat"][n])).softmax(-1)
            differing = float(p[own ^ other].sum()) / float(p[other].sum())
            judge.true(f"{kind} {ASKS[n]}: {differing:.1e} differ", differing < 1e-4)
            judge.true(f"{kind} {ASKS[n]}: likeliest", bool(own[int(found["likeliest"][n]) - 1]))
        again = run(logits, rows)
        judge.true(f"{kind}: repetition", again.tobytes() == found.tobytes())
    judge.verdict()


@pytest.mark.parametrize("size", [1009, 128256])
def test_rows_do_not_depend_on_neighbours(size: int) -> None:
    """Among 700 rows, more than the teams take at a time: the record is that of the row alone."""
    asks = [ASKS[n % len(ASKS)] if n % 5 == 0 else {} for n in range(700)]
    logits = torch.randn(700, size, device="cuda", dtype=torch.bfloat16) * 2
    rows = rows_of(asks)
    together = run(logits, rows)
    for n in (*range(0, 60, 5), 695):
        alone = run(logits[n : n + 1], rows[n : n + 1])
        assert alone.tobytes() == together[n : n + 1].tobytes(), n
    assert not together["likeliest"][[n for n in range(700) if n % 5]].any()


def test_unaligned_rows_are_the_same_rows() -> None:
    logits = torch.randn(len(ASKS), 5000, device="cuda")
    for begin in (1, 3, 4):
        view = logits[:, begin : begin + 4000]
        assert run(view, rows_of(ASKS)).tobytes() == run(view.contiguous(), rows_of(ASKS)).tobytes()


@pytest.mark.parametrize("size", [17, 4096, 151936])
def test_samples_are_of_what_is_kept(size: int) -> None:
    logits = distributions(len(ASKS), size, torch.float32)["normal"]
    equal = count = 0
    for trial in range(4):
        rows = rows_of(ASKS, trial)
        records = run(logits, rows)
        narrowed = torch.from_numpy(records.view(np.int32).reshape(len(ASKS), -1).copy())
        drawn = draw_rows(logits, narrowed)
        want = draw_rows(logits, narrowed, is_reference=True)
        assert drawn.outcomes.all()
        for n, token in enumerate(drawn.token_ids.tolist()):
            count += 1
            equal += token == int(want.token_ids[n])
            if records["likeliest"][n] and records["heat"][n] > 1e-30:
                assert kept(logits[n], records[n])[token], ASKS[n]
        assert same_bits(draw_rows(logits, narrowed).token_ids, drawn.token_ids)
    assert equal / count > 0.97


def test_broken_rows() -> None:
    logits = torch.randn(4, 1009, device="cuda")
    logits[0, 1008], logits[1], logits[2, 0] = float("nan"), float("-inf"), float("inf")
    rows = make_rows(4, typical_p=0.5, top_k=5, dynatemp_range=0.5)
    edits = torch.zeros((0, EDIT_WORDS), dtype=torch.int32)
    records = run(logits, rows)
    assert records["likeliest"].astype(bool).tolist() == [False, False, False, True]
    narrowed = torch.from_numpy(records.view(np.int32).reshape(4, -1).copy())
    assert draw_rows(logits, narrowed, edits).outcomes.tolist() == [0, 0, 0, 1]
