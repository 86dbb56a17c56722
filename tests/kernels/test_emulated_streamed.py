"""GEMMs of a few rows' experts by a ring, from their CUDA source on a CPU: the bits of others."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import Case, Sizes, make_case
from fixtures.tiers import quick_of
from slipstream.kernels.experts.grouped import Added, down, gate_up
from slipstream.kernels.experts.sm90 import streamed
from slipstream.kernels.experts.spec import Gate
from slipstream.kernels.runtime import jit

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
CASES = [  # rows, sizes, CTAs, slots
    (1, Sizes(6, 3, 2064, 48), 7, 2),  # a row ends within a slot and a chunk; CTAs of 2 and 3 units
    (8, Sizes(3, 2, 144, 64), 132, 5),  # tiles of several rows, one without; CTAs of no unit
    (5, Sizes(20, 4, 1040, 32), 4, 3),
    (3, Sizes(2, 1, 4128, 48), 1, 4),
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
