"""GEMMs of a few rows' experts by a ring, from their CUDA source on a CPU: the bits of others."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import Case, Sizes, make_case
from fixtures.tiers import quick_of
from slipstream.kernels.experts.combine import Shared
from slipstream.kernels.experts.down_add import down_add
from slipstream.kernels.experts.grouped import Added, down, gate_up
from slipstream.kernels.experts.sm90 import streamed, streamed_add
from slipstream.kernels.experts.sm90.ring import Ring
from slipstream.kernels.experts.spec import Gate
from slipstream.kernels.runtime import jit

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
CASES = [  # rows, sizes, CTAs, slots
    (1, Sizes(6, 3, 2064, 48), 7, 2),  # a row ends within a slot and a chunk; CTAs of 2 and 3 units
    (8, Sizes(3, 2, 144, 64), 132, 5),  # tiles of several rows, one without; CTAs of no unit
    (5, Sizes(20, 4, 1040, 32), 4, 3),
    (3, Sizes(2, 1, 4128, 48), 1, 4),
]
SUMS = [
    (1, Sizes(6, 3, 40, 2064), 3, 2),  # 13 or 14 outputs a CTA; a row ends within a slot
    (8, Sizes(5, 2, 136, 144), 4, 3),  # batches of 12, 11 outputs
    (2, Sizes(40, 10, 24, 336), 1, 5),
    (4, Sizes(64, 16, 16, 48), 2, 4),
]


def run(patch: pytest.MonkeyPatch, case: Case, is_streamed: bool, added: Added | None) -> tuple:
    """Return gated values, and the outputs of pairs of the same values."""
    patch.setattr(streamed, "refusal", lambda *_: None if is_streamed else "not wanted")
    routed = case.routed(8)
    up = gate_up.launcher(
        case.x, case.gate_up.values, case.gate_up, routed, case.gate, False, added
    )
    inner = make_case(len(routed.order), Sizes(1, 1, case.sizes.inner, 8), case.x.dtype).x
    return up, down.launcher(inner, case.down.values, case.down, routed)


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize("of", quick_of(CASES, CASES[:2]), ids=str)
def test_bits_are_those_of_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, of: tuple[int, Sizes, int, int], fp8: bool
) -> None:
    """Whatever the grid and the ring; and the oracle's values, within a rounding."""
    num_rows, sizes, num_ctas, num_slots = of
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: num_ctas)
    monkeypatch.setattr(streamed, "MOST_SLOTS", num_slots)
    monkeypatch.setattr(streamed, "UNDER_WAY", 2 + num_slots % 2)
    dtype = torch.float16 if num_rows == 5 else torch.bfloat16
    gate, bias = (Gate.CLAMPED, True) if num_rows == 8 else (Gate.SILU, num_rows == 3)
    case = make_case(num_rows, sizes, dtype, fp8, bias, gate, seed=num_rows)
    found, others = (run(monkeypatch, case, each, None) for each in (True, False))
    for ours, theirs in zip(found, others, strict=True):
        assert torch.equal(ours, theirs)
    how = (case.gate_up.values, case.gate_up, case.routed(8), case.gate)
    expected = gate_up.oracle(case.x.float(), *how)
    torch.testing.assert_close(found[0].float(), expected, rtol=ROUNDING[dtype], atol=1e-4)


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize("of", quick_of(SUMS, SUMS[:1]), ids=str)
def test_sums_are_added_once(
    monkeypatch: pytest.MonkeyPatch, of: tuple[int, Sizes, int, int], fp8: bool
) -> None:
    """Within a rounding of the oracle, alone and with what is shared; the bits of any grid."""
    num_rows, sizes, num_ctas, num_slots = of
    emulate(monkeypatch)
    monkeypatch.setattr(streamed_add, "refusal", lambda *_: None)
    dtype = torch.float16 if num_rows == 2 else torch.bfloat16
    case = make_case(num_rows, sizes, dtype, fp8, bias=num_rows != 8, seed=num_rows)
    routed = case.routed(8)
    inner = make_case(num_rows * sizes.top_k, Sizes(1, 1, sizes.inner, 8), dtype).x
    residual = torch.cat([case.x * 2, case.x], 1)[:, : sizes.hidden]  # rows of wider ones
    gate = make_case(num_rows, Sizes(1, 1, 9, 8), dtype).x[:, 8:]
    for beside in (None, Shared(case.x.flip(1).contiguous(), gate)):
        how = (case.down, routed, beside)
        expected = down_add.oracle(inner, case.down.values, residual.float(), *how)
        found = []
        for ctas, slots in ((num_ctas, num_slots), (132, 7)):
            monkeypatch.setattr(jit, "num_multiprocessors", lambda _, ctas=ctas: ctas)
            monkeypatch.setattr(streamed_add, "MOST_SLOTS", slots)
            wide = torch.full((num_rows, 2 * sizes.hidden), torch.nan, dtype=dtype)
            out = wide[:, : sizes.hidden]
            out.copy_(residual)
            assert down_add.launcher(inner, case.down.values, out, *how) is out
            assert wide[:, sizes.hidden :].isnan().all()
            found.append(out)
        assert torch.equal(*found)
        torch.testing.assert_close(out.float(), expected, rtol=ROUNDING[dtype], atol=2e-4)


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "e4m3"])
def test_memory_of_a_cta(fp8: bool) -> None:
    """A launch asks for more than 48 KB where static memory does not fit beside; never for all."""
    static, default = 15 << 10, 48 << 10
    for width in range(16, 16385, 16):
        for num_rows in (1, 2, 8, 64):
            ring = Ring(num_rows, width, fp8)
            if (slots := ring.num_slots(7)) < 2:
                continue
            dynamic = ring.num_bytes(7)
            assert dynamic >= slots * ring.slot_bytes + num_rows * ring.pitch
            assert dynamic > default or dynamic + static <= default
            assert dynamic + static <= 227 << 10
            assert slots == 7 or dynamic + ring.slot_bytes + static > 227 << 10
            row_bytes = width * (1 if fp8 else 2)
            assert ring.part_bytes % 512 == 0 or ring.part_bytes >= row_bytes
