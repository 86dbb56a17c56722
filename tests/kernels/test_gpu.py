"""Every kernel, every legal configuration, on a GPU: against fp64, poisoned, repeated bitwise."""

from functools import partial

import pytest
import torch
from fixtures.kernels.attention_cases import BLOCK_SIZES, HEAD_SIZES, HEADS
from fixtures.kernels.checking import DTYPES, Judge, poison, random, same_bits, short
from slipstream.kernels.elementwise.activation import gegelu_mul, gelu_mul, silu_mul, xielu
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.elementwise.rope import HeadStages, rope_and_cache

pytestmark = pytest.mark.gpu


def layouts(n: int, width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same random rows: contiguous, with aligned gaps, and one element off any alignment."""
    rows = random(n, width, dtype=dtype, seed=n + width)
    gaps = torch.full((n, width + 24), float("nan"), dtype=dtype, device="cuda")[:, 8 : 8 + width]
    odd = torch.full((n, width + 3), float("nan"), dtype=dtype, device="cuda")[:, 1 : 1 + width]
    return {"contiguous": rows, "gaps": gaps.copy_(rows), "odd": odd.copy_(rows)}


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_norms(dtype: torch.dtype) -> None:
    judge = Judge(f"norm {short(dtype)}")
    for width in (1, 8, 37, 64, 100, 128, 512, 520, 1000, 4096, 8193, 16384):
        weight = 1 + 0.1 * random(width, dtype=dtype, seed=1)
        for n in (1, 3, 5, 130):
            for layout, x in layouts(n, width, dtype).items():
                case = f"{n} x {width} {layout}"
                naive = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
                wide = x.double()
                exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
                exact *= weight.double()
                poison((n, width), dtype=dtype)
                judge.close(f"rms_norm {case}", rms_norm(x, weight, 1e-5), exact, naive)
                judge.repeats(f"rms_norm {case}", lambda x=x, w=weight: rms_norm(x, w, 1e-5))
                exact = exact / weight.double() * (1 + weight.double())
                out, naive = rms_norm(x, weight, 1e-5, plus_one=True), naive / weight * (1 + weight)
                judge.close(f"rms_norm plus one {case}", out, exact, naive)
    assert rms_norm(random(0, 64, dtype=dtype), weight[:64], 1e-5).shape == (0, 64)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_gated_activations(dtype: torch.dtype) -> None:
    judge = Judge(f"silu_mul {short(dtype)}")
    for width in (1, 8, 37, 100, 1000, 4096, 14336):
        for n in (1, 3, 300):
            for layout, x in layouts(n, 2 * width, dtype).items():
                x *= 4
                gate, up = x.chunk(2, -1)
                naive = torch.nn.functional.silu(gate) * up
                exact = torch.nn.functional.silu(gate.double()) * up.double()
                poison((n, width), dtype=dtype)
                judge.close(f"{n} x {width} {layout}", silu_mul(x), exact, naive)
                judge.repeats(f"{n} x {width} {layout}", lambda x=x: silu_mul(x))
                gelu = partial(torch.nn.functional.gelu, approximate="tanh")
                naive, exact = gelu(gate) * up, gelu(gate.double()) * up.double()
                judge.close(f"gelu {n} x {width} {layout}", gelu_mul(x), exact, naive)
                judge.repeats(f"gelu {n} x {width} {layout}", lambda x=x: gelu_mul(x))
                naive, exact = (
                    gegelu(*pair) for pair in ((gate, up), (gate.double(), up.double()))
                )
                judge.close(f"gegelu {n} x {width} {layout}", gegelu_mul(x, 3.0), exact, naive)
    judge.verdict()


def gegelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=3)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-3, 3) + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_xielu(dtype: torch.dtype) -> None:
    judge = Judge(f"xielu {short(dtype)}")
    numbers = torch.tensor([0.9, 1.4, 0.5, -1e-6], device="cuda")
    above, below, beta, most = numbers.tolist()

    def plain(x: torch.Tensor) -> torch.Tensor:
        curved = (torch.expm1(x.clamp(max=most)) - x) * below
        return torch.where(x > 0, above * x * x, curved) + beta * x

    for width in (1, 37, 1000, 14336):
        for n in (1, 3, 300):
            for layout, x in layouts(n, width, dtype).items():
                x *= 4
                poison((n, width), dtype=dtype)
                name = f"{n} x {width} {layout}"
                judge.close(name, xielu(x, numbers), plain(x.double()), plain(x))
                judge.repeats(name, lambda x=x: xielu(x, numbers))
    judge.verdict()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def check_rope(
    judge: Judge,
    dtype: torch.dtype,
    heads: tuple[int, int],
    d: int,
    block: int,
    odd: bool = False,
    normed: bool = False,
    late: bool = False,
) -> None:
    hq, h = heads
    case = f"heads {heads} d {d} block {block}{' odd' if odd else ''}{' norms' if normed else ''}"
    case += " late" if late else ""
    n, num_blocks = 37, 300 // block + 2
    width = (hq + 2 * h) * d
    rows = random(n, width + 1, dtype=dtype, seed=d)[:, int(odd) : width + int(odd)]
    if not odd:
        rows = rows.contiguous()
    q, k, v = (x.unflatten(1, (-1, d)) for x in rows.split((hq * d, h * d, h * d), 1))
    angles = torch.rand(500, d // 2, device="cuda") * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 500, (n,), device="cuda")
    slots = torch.randperm(num_blocks * block, device="cuda")[:n]
    slots[::5] = -1
    cache = torch.full((num_blocks, h, 2, block, d), float("nan"), dtype=dtype, device="cuda")
    tables = [cos_sin[positions][:, None].chunk(2, -1)]
    norms = [1 + 0.1 * random(d, dtype=dtype, seed=i) for i in range(2)] if normed else []
    factors = torch.rand(500, device="cuda") + 0.5
    own = {"are_late": True, "factors": factors} if late else {}

    def expected(x: torch.Tensor, i: int, dtype: torch.dtype) -> torch.Tensor:
        x = x.to(dtype)
        norm = norms[i].to(dtype) if norms else 1.0
        if norms:
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        if not late:
            return rotate(x * norm, *(t.to(dtype) for t in tables[0]))
        last = factors[positions][:, None, None].to(dtype) if i == 0 else 1.0
        return rotate(x, *(t.to(dtype) for t in tables[0])) * norm * last

    exact_q, exact_k = (expected(x, i, torch.float64) for i, x in enumerate((q, k)))
    naive_q, naive_k = (expected(x, i, dtype) for i, x in enumerate((q, k)))
    before = [x.clone() for x in (q, k, v, rows)]
    outputs = []
    for _ in range(3):
        q.copy_(before[0])
        cache.fill_(float("nan"))
        stages = HeadStages(None, *norms, eps=1e-5, **own)
        rope_and_cache(q, k, v, cos_sin, positions, slots, cache, stages)
        outputs.append((q.clone(), cache.clone()))
    judge.close(f"q {case}", q, exact_q, naive_q)
    keep = slots >= 0
    at, row = slots[keep] // block, slots[keep] % block
    judge.close(f"k {case}", cache[at, :, 0, row], exact_k[keep], naive_k[keep])
    judge.true(f"v {case}", same_bits(cache[at, :, 1, row], before[2][keep]))
    judge.true(f"k, v unchanged {case}", same_bits(rows[:, hq * d :], before[3][:, hq * d :]))
    cache[at, :, :, row] = float("nan")
    judge.true(f"elsewhere {case}", bool(cache.isnan().all()))
    repeated = all(same_bits(a, b) for out in outputs for a, b in zip(out, outputs[0], strict=True))
    judge.true(f"repetition {case}", repeated)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rope_and_cache(dtype: torch.dtype) -> None:
    judge = Judge(f"rope_and_cache {short(dtype)}")
    for d in HEAD_SIZES:
        for block in BLOCK_SIZES:
            for odd in (False, True):
                check_rope(judge, dtype, (6, 2), d, block, odd, normed=block == 16)
        for heads in HEADS:
            check_rope(judge, dtype, heads, d, 32)
            check_rope(judge, dtype, heads, d, 32, normed=True)
            check_rope(judge, dtype, heads, d, 32, normed=d % 3 > 0, late=True)
    judge.verdict()
