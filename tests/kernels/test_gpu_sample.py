"""Sampling on a GPU: the reference's tokens, but where scores or borders differ by rounding."""

import pytest
import torch
from kernels.checking import Judge, same_bits
from slipstream.kernels.sample import edit_logits, philox, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

VOCABULARIES = (1, 2, 5, 1009, 4096, 32000, 128256)
# (temperature, top_k, top_p, min_p)
PARAMETERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 0, 0.999, 0.0),
    (0.8, 40, 0.95, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.9, 100, 0.8, 0.1),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (2.0, 1000000, 0.5, 1.0),
    (0.01, 3, 0.99, 0.0),
    (5.0, 7, 1.0, 0.0),
    (0.0, 5, 0.5, 0.5),
    (1e-39, 0, 1.0, 0.0),
]


def distributions(rows: int, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(size)
    normal = torch.randn((rows, size), generator=generator, device="cuda")
    outlier = normal.clone()
    outlier[:, size // 2] = 1e30
    masked = normal.clone()
    masked[:, ::3] = float("-inf")
    masked[:, -1] = 0.5
    return {
        "normal": normal * 3,
        "peaked": normal * 20,
        "ties": (normal * 2).round() / 2,
        "equal": torch.full_like(normal, -1.5),
        "outlier": outlier,
        "masked": masked,
        "negative": -normal.abs() - 100,
    }


def is_allowed(
    logits: torch.Tensor, row: tuple[float, int, float, float], noise: torch.Tensor, token: int
) -> bool:
    """Whether fp64 could draw `token`, borders moved by rounding errors either way."""
    temperature, top_k, top_p, min_p = row
    highest = logits.max()
    if temperature == 0 or not bool((highest / temperature).isfinite()):
        return bool(token == int(logits.argmax()))
    scaled = (logits / temperature).double()
    order = scaled.sort(descending=True).values
    inside = scaled >= order[min(top_k or len(order), len(order)) - 1]
    weights = (scaled - order[0]).exp() * inside
    total = weights.sum()
    ranked = (order - order[0]).exp()
    before = (ranked.cumsum(0) - ranked)[torch.searchsorted(-order, -scaled)]
    limits = [top_p * float(total) * (1 + s * 1e-6) + s * 1e-9 for s in (-1, 1)]
    strict = inside & ((before < limits[0]) | (top_p >= 1)) & (weights >= min_p * (1 + 1e-5))
    loose = inside & ((before < limits[1]) | (top_p >= 1) | (before == 0))
    loose &= weights >= min_p * (1 - 1e-5)
    scores = scaled + noise
    best = scores[strict | (scaled == order[0])].max()
    return bool(loose[token]) and float(scores[token]) >= float(best) - 1e-4 * (
        1 + abs(float(best))
    )


@pytest.mark.parametrize("size", VOCABULARIES)
def test_sample(size: int) -> None:
    judge = Judge(f"sample {size}")
    rows = len(PARAMETERS)
    columns = list(zip(*PARAMETERS, strict=True))
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    parameters = [
        torch.tensor(c, dtype=t, device="cuda") for c, t in zip(columns, dtypes, strict=True)
    ]
    num_equal = num_rows = 0
    for kind, logits in distributions(rows, size).items():
        for trial in range(3):
            seeds = torch.arange(rows, device="cuda") * 0x123456789ABCDEF + trial
            counters = torch.arange(rows, device="cuda") * 7 + trial
            args = (logits, *parameters, seeds, counters)
            tokens, log_probs, is_finite = sample(*args)
            want, _, _ = sample.reference(*args)
            uniform = ((philox(seeds, counters, size) >> 9).double() + 0.5) * 2.0**-23
            noise = -torch.log(-torch.log(uniform))
            exact = logits.double().log_softmax(-1).gather(-1, tokens.clamp(0, size - 1)[:, None])
            judge.true(f"{kind}: not finite", bool(is_finite.all()))
            for n in range(rows):
                token = int(tokens[n])
                num_rows += 1
                num_equal += token == int(want[n])
                judge.true(
                    f"{kind} {PARAMETERS[n]}: {token}, reference {int(want[n])}",
                    0 <= token < size
                    and (
                        token == int(want[n])
                        or is_allowed(logits[n], PARAMETERS[n], noise[n], token)
                    ),
                )
            error = (log_probs.double() - exact[:, 0]).abs()
            worst = float((error / (1 + exact[:, 0].abs())).max())
            judge.true(f"{kind}: log prob error {worst:.1e}", worst < 1e-5)
            repeats = [sample(*args)[0] for _ in range(5)]
            judge.true(f"{kind}: repetition", all(same_bits(tokens, r) for r in repeats))
    share = num_equal / num_rows
    judge.true(f"only {share:.1%} equal the reference", share > 0.99)
    judge.verdict()


def test_broken_rows() -> None:
    logits = torch.randn(6, 1009, device="cuda")
    logits[0, 1008] = float("nan")
    logits[1] = float("-inf")
    logits[2, 0] = float("inf")
    logits[3, :1008] = float("-inf")
    ones = torch.ones(6, device="cuda")
    zeros = torch.zeros(6, dtype=torch.int64, device="cuda")
    for temperature in (0.0, 1.0):
        args = (logits, ones * temperature, zeros.int(), ones, ones * 0, zeros, zeros)
        tokens, _, is_finite = sample(*args)
        assert is_finite.tolist() == [False, False, False, True, True, True]
        assert sample.reference(*args)[2].tolist() == is_finite.tolist()
        assert int(tokens[3]) == 1008
        assert all(0 <= token < 1009 for token in tokens.tolist())


def test_rows_do_not_depend_on_neighbours() -> None:
    logits = torch.randn(64, 5000, device="cuda")[:, 3:4003]
    ones = torch.ones(64, device="cuda")
    seeds = torch.arange(64, device="cuda")
    top_k = torch.full((64,), 30, dtype=torch.int32, device="cuda")
    args = (logits, ones, top_k, ones * 0.9, ones * 0, seeds, seeds)
    tokens, log_probs, _ = sample(*args)
    for n in (0, 17, 63):
        alone = sample(*(arg[n : n + 1] for arg in args))
        assert same_bits(alone[0], tokens[n : n + 1])
        assert same_bits(alone[1], log_probs[n : n + 1])


def test_edit_logits() -> None:
    for rows, size, count in ((1, 1, 1), (3, 1009, 100), (256, 128256, 5000)):
        logits = torch.randn(rows, size + 5, device="cuda")[:, 5:]
        flat = torch.randperm(rows * size, device="cuda")[:count]
        factors = torch.rand(len(flat), device="cuda") + 0.5
        addends = torch.randn(len(flat), device="cuda")
        addends[::9] = float("-inf")
        want = logits.clone()
        edit_logits.reference(want, flat // size, flat % size, factors, addends)
        edit_logits(logits, flat // size, flat % size, factors, addends)
        assert same_bits(logits, want)
