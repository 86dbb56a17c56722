"""Experts by places in e4m3 on a Hopper: against fp64 of rounded rows, repeated bitwise."""

import pytest
import torch
from fixtures.kernels.checking import Judge, poison, same_bits, short
from fixtures.kernels.expert_cases import SHAPES, Sizes, make_case
from slipstream.kernels.elementwise.eight_bits import quantize
from slipstream.kernels.experts.grouped import down, gate_up
from slipstream.kernels.experts.sm90 import streamed
from slipstream.kernels.experts.spec import Gate
from slipstream.kernels.runtime import jit
from torch import Tensor

pytestmark = pytest.mark.gpu

OF_E4M3 = [
    *(each for each in SHAPES if each[0].hidden % 16 == each[0].inner % 16 == 0),
    (Sizes(3, 1, 1008, 272), (1, 20, 129)),
    (Sizes(8, 2, 4096, 14336), (8, 32, 128)),
]


@pytest.fixture(autouse=True)
def on_a_hopper() -> None:
    """Skip where products in e4m3 have another kernel."""
    if not jit.is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def rounded(x: Tensor) -> Tensor:
    """Return rows in fp32 as e4m3 has them."""
    values, scales = quantize.oracle(x)
    return values.float() * scales[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_gemms(dtype: torch.dtype) -> None:
    """Within what sums of e4m3 lose in the tensor cores, whose terms are added in some 13 bits."""
    judge = Judge(f"streamed {short(dtype)}")
    for sizes, all_rows in OF_E4M3:
        for n in all_rows:
            gate = Gate.CLAMPED if sizes.top_k == 3 else Gate.SILU
            case = make_case(n, sizes, dtype, True, n % 2 == 0, gate, "cuda", seed=n)
            for rows in streamed.TILE_ROWS:
                routed = case.routed(rows)
                name = f"{n} rows of {sizes}, tiles of {rows}"
                up = (case.gate_up.values, case.gate_up, routed, gate)
                last = (case.down.values, case.down, routed)
                poison((len(routed.order), sizes.inner), dtype=dtype)
                inner = gate_up(case.x, *up)
                outputs = down(inner, *last)
                for what, found, wanted in (
                    ("gates", inner, gate_up.oracle(rounded(case.x), *up)),
                    ("outputs", outputs, down.oracle(rounded(inner), *last)),
                ):
                    error = float((found.float() - wanted).abs().max() / wanted.abs().max())
                    judge.true(f"{what} of {name}: {error:.1e}", error < 2**-6)
                again = down(gate_up(case.x, *up), *last)
                judge.true(f"{name} again", same_bits(again, outputs))
    judge.verdict()


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Bit for bit: in tiles of every size, at every place in one, beside NaN."""
    judge = Judge("rows alone")
    for sizes, n in ((Sizes(128, 8, 2048, 768), 200), (Sizes(8, 2, 1024, 512), 300)):
        case = make_case(n, sizes, torch.bfloat16, fp8=True, device="cuda")
        residual = torch.randn_like(case.x)
        whole = case.run(streamed.TILE_ROWS[0], residual)
        for rows in streamed.TILE_ROWS:
            judge.true(f"tiles of {rows}", same_bits(case.run(rows, residual), whole))
            for kept in (torch.arange(1), torch.arange(n).flip(0)[:77], torch.arange(3, n, 7)):
                some = make_case(n, sizes, torch.bfloat16, fp8=True, device="cuda")
                some.x, some.logits = some.x[kept.cuda()], some.logits[kept.cuda()]
                found = some.run(rows, residual[kept.cuda()])
                judge.true(f"{len(kept)} rows by {rows}", same_bits(found, whole[kept.cuda()]))
            harmed = make_case(n, sizes, torch.bfloat16, fp8=True, device="cuda")
            harmed.x[7] = torch.nan
            own = torch.arange(n, device="cuda") == 7
            found = harmed.run(rows, residual)
            judge.true(f"beside NaN by {rows}", same_bits(found[~own], whole[~own]))
            judge.true(f"NaN by {rows}", bool(found[own].isnan().all()))
    judge.verdict()
