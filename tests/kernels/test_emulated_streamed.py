"""GEMMs of experts by places in e4m3, by their CUDA sources run on a CPU, against their oracles."""

from dataclasses import replace

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import Case, Sizes, make_case
from fixtures.tiers import quick_of
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.experts import grouped
from slipstream.kernels.experts.grouped import Added, down, gate_up, tile_rows, tiles_of
from slipstream.kernels.experts.sm90 import streamed
from slipstream.kernels.experts.spec import Gate
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import KNOWN
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 2**-8, FP16: 2**-11}
HOPPER = KNOWN["sm_90a"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Run tiles by the kernel under test, with three CTAs and a ring of two slots."""
    emulate(monkeypatch)
    monkeypatch.setattr(grouped, "target_of", lambda _: HOPPER)
    monkeypatch.setattr(streamed, "num_slots", lambda _: 2)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 3)
    return monkeypatch


def rounded(x: Tensor) -> Tensor:
    """Return rows in fp32 as e4m3 has them."""
    values, scales = eight_bits.quantize.oracle(x)
    return values.float() * scales[:, None]


def run(case: Case, rows: int) -> tuple[Tensor, Tensor]:
    """Return gated values, and outputs of pairs."""
    routed = case.routed(rows)
    inner = gate_up.launcher(case.x, case.gate_up.values, case.gate_up, routed, case.gate)
    return inner, down.launcher(inner, case.down.values, case.down, routed)


def check(case: Case, rows: int) -> tuple[Tensor, Tensor]:
    """Compare both with the oracles' of rounded rows, within a rounding; return them."""
    inner, found = run(case, rows)
    routed, bounds = case.routed(rows), {"rtol": ROUNDING[case.x.dtype], "atol": 1e-4}
    up = (case.gate_up.values, case.gate_up, routed, case.gate)
    torch.testing.assert_close(inner.float(), gate_up.oracle(rounded(case.x), *up), **bounds)
    out = (case.down.values, case.down, routed)
    torch.testing.assert_close(found.float(), down.oracle(rounded(inner), *out), **bounds)
    return inner, found


@pytest.mark.rest
@pytest.mark.parametrize("rows", streamed.TILE_ROWS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_tiles(dtype: torch.dtype, rows: int, emulated: pytest.MonkeyPatch) -> None:
    """Two tiles of an expert; several units of a CTA, and of others one less; ends in a box."""
    gate = Gate.CLAMPED if rows == 32 else Gate.SILU
    check(
        make_case(rows + 3, Sizes(3, 2, 272, 144), dtype, True, rows != 48, gate, seed=rows), rows
    )


@pytest.mark.parametrize("rows", quick_of((16, 32), (16,)))
def test_rows_are_alone_and_repeatable(rows: int, emulated: pytest.MonkeyPatch) -> None:
    """A row of NaN and one of infinity harm no other; one alone has the bits that it has there."""
    case = make_case(26, Sizes(3, 2, 144, 64), BF16, fp8=True, bias=True)
    inner, whole = check(case, 16)
    for found, wanted in zip(run(case, 16), (inner, whole), strict=True):
        assert torch.equal(found, wanted)
    harmed = replace(case, x=case.x.clone())
    harmed.x[5], harmed.x[9, 3] = torch.nan, torch.inf
    outputs = run(harmed, 16)[1].view(26, 2, -1)
    own = torch.tensor([row in (5, 9) for row in range(26)])
    assert bool(outputs[own].isnan().all())
    assert torch.equal(outputs[~own], whole.view(26, 2, -1)[~own])
    alone = replace(case, x=case.x[7:8], logits=case.logits[7:8])
    assert torch.equal(run(alone, rows)[1], whole.view(26, 2, -1)[7])


@pytest.mark.rest
def test_adapters_add_before_the_gate(emulated: pytest.MonkeyPatch) -> None:
    """Places that have no terms keep their bits."""
    case = make_case(11, Sizes(3, 2, 128, 144), BF16, fp8=True, bias=True)
    routed = case.routed(16)
    given = case.gate_up.values, case.gate_up, routed, case.gate, False
    values = torch.randn(22, 288, generator=torch.Generator().manual_seed(1)).bfloat16()
    marks = torch.arange(22) % 2
    values[marks == 0] = torch.nan
    added = Added(values, marks.int())
    plain, found = gate_up.launcher(case.x, *given), gate_up.launcher(case.x, *given, added)
    wanted = gate_up.oracle(rounded(case.x), *given, added)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=1e-4)
    assert torch.equal(found[marks == 0], plain[marks == 0])
    assert not torch.equal(found[marks == 1], plain[marks == 1])


@pytest.mark.rest
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rows_are_gathered_as_they_are_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a wider matrix, some of them twice: the bits of both oracles."""
    emulate(monkeypatch)
    x = (torch.randn(6, 144, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)[:, 8:136]
    order = torch.tensor([9, 0, 11, 3, 3, 8, 7, 1], dtype=torch.int32)
    found = eight_bits.gather_quantize.launcher(x, order, 2)
    for wanted in (
        eight_bits.gather_quantize.oracle(x, order, 2),
        eight_bits.quantize.oracle(x[order.long() // 2]),
    ):
        assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
        assert torch.equal(found.scales, wanted.scales)


@pytest.mark.parametrize("rows", streamed.TILE_ROWS)
def test_rings_have_room(rows: int) -> None:
    """Slots, barriers and what is written of places fit a multiprocessor."""
    slots = streamed.num_slots(rows)
    used = slots * ((256 + rows) * 128 + 16) + 2 * rows * 12
    assert slots >= 4
    assert used <= 226 << 10


def test_where_it_is_taken() -> None:
    """Products of e4m3 on Hopper have its tiles above eight rows, but in deterministic mode."""
    mixtral = [(8, 16), (32, 32), (64, 48), (128, 64), (256, 128), (512, 128)]
    found = [tile_rows(2 * n, 8, True, False, HOPPER) for n, _ in mixtral]
    assert found == [rows for _, rows in mixtral]
    assert tiles_of(HOPPER, False, True)["streamed"] == streamed.TILE_ROWS
    for target, deterministic, is_fp8 in (
        (HOPPER, True, True),
        (HOPPER, False, False),
        (KNOWN["sm_89"], False, True),
    ):
        assert tiles_of(target, deterministic, is_fp8)["streamed"] == ()
        assert streamed.refusal(target, deterministic, is_fp8)
    assert tile_rows(2, 8, True, False, HOPPER) == grouped.SKINNY_ROWS
