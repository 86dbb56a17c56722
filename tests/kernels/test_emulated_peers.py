"""Sums over peer memory: the CUDA source, on GPUs emulated together, against the oracle."""

import threading

import pytest
import torch
from fixtures.kernels.emulation import emulate, on_gpus
from fixtures.tiers import quick_of
from slipstream.kernels.comm.all_reduce import (
    EMPTY_BYTES,
    GRID,
    MAX_RANKS,
    MEMORY_BYTES,
    PACKS_AT,
    Peers,
    sum_into,
    sum_norm,
    total,
)
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from torch import Tensor

BF16 = torch.bfloat16
BEFORE = -2  # the epoch that has passed: the next is the last before they wrap
CASES = {
    "one shot": ("one_shot", 2, True),
    "two shots": ("two_shot", 2, True),
    "one shot of three, no residual": ("one_shot", 3, False),
    "two shots of three, no residual": ("two_shot", 3, False),
}


class Gpus:
    """GPUs with `BEFORE` calls, by their memory; the last that met was the call `met`."""

    def __init__(self, size: int, met: int = BEFORE) -> None:
        self.late = torch.zeros(2, dtype=torch.int32)
        self.memory = [torch.zeros(MEMORY_BYTES // 4, dtype=torch.int32) for _ in range(size)]
        for each in self.memory:
            each[: 2 * GRID * MAX_RANKS] = met
            each[PACKS_AT // 4 : (PACKS_AT + EMPTY_BYTES) // 4] = -1
        bases = tuple(each.data_ptr() for each in self.memory)
        limit = torch.tensor([300 * 10**9])
        epochs = [torch.full((GRID,), BEFORE, dtype=torch.int32) for _ in range(size)]
        self.peers = [
            Peers(bases, rank, epochs[rank], limit, self.late.data_ptr()) for rank in range(size)
        ]


def drawn(*sizes: int) -> Tensor:
    rng = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=rng).to(BF16)


@pytest.mark.parametrize("name", quick_of(CASES, {"two shots"}))
def test_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls: both buffers, one of them twice, and an epoch that wraps."""
    emulate(monkeypatch)
    way, size, adds = CASES[name]
    gpus = Gpus(size)
    for width in (1000, 12008, 5000):
        x, before = drawn(size, width), drawn(width)
        outs = [before.clone() for _ in gpus.peers]

        def call(rank: int, x: Tensor = x, outs: list[Tensor] = outs) -> Tensor:
            residual = outs[rank] if adds else None
            sum_into(gpus.peers[rank], way, x[rank], residual, outs[rank])
            return outs[rank]

        wanted = total(list(x), before if adds else None)
        assert all(torch.equal(found, wanted) for found in on_gpus(size, call))


def test_data_of_all_ones_is_nan_and_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These bits mean that nothing has come yet; an infinity and a zero that has a sign arrive."""
    emulate(monkeypatch)
    gpus, x = Gpus(2), drawn(2, 64)
    x[0, 8:24].view(torch.int16).fill_(-1)
    x[1, 24:32], x[0, 24:32], x[0, 40], x[1, 40] = float("inf"), -0.0, -0.0, -0.0

    def call(rank: int) -> Tensor:
        out = torch.empty(64, dtype=BF16)
        sum_into(gpus.peers[rank], "one_shot", x[rank], None, out)
        return out

    for _ in range(3):
        for found in on_gpus(2, call):
            assert torch.equal(found.isnan(), total(list(x)).isnan())
            assert torch.equal(found.nan_to_num().signbit(), total(list(x)).nan_to_num().signbit())
            assert torch.equal(found.nan_to_num(), total(list(x)).nan_to_num())


@pytest.mark.parametrize("met", [2**31 - 100, 1])
def test_a_flag_of_any_age_lets_nobody_pass(met: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2^31 calls without a meeting an old flag is the larger number."""
    emulate(monkeypatch)
    gpus, x, width = Gpus(2, met), drawn(2, 5000), 5000
    first = threading.Event()

    def call(rank: int) -> Tensor:
        out = torch.zeros(width, dtype=BF16)
        if rank == 1:
            first.wait()
        else:
            threading.Timer(0.05, first.set).start()  # sooner or later: the result is the same
        sum_into(gpus.peers[rank], "two_shot", x[rank], None, out)
        return out

    assert all(torch.equal(found, total(list(x))) for found in on_gpus(2, call))


def test_a_sum_and_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    gpus = Gpus(2)
    x, before, weight = drawn(2, 3, 2568), drawn(3, 2568), drawn(2568)
    residuals = [before.clone() for _ in gpus.peers]

    def call(rank: int) -> Tensor:
        norm = RmsNorm(weight, 1e-5, plus_one=True)
        return sum_norm(gpus.peers[rank], x[rank], residuals[rank], norm)

    found, wanted = on_gpus(2, call), total(list(x), before)
    normed = rms_norm(wanted, weight, 1e-5, True)
    for rank in range(2):
        assert torch.equal(residuals[rank], wanted)
        torch.testing.assert_close(found[rank], normed, atol=0, rtol=0.008)
