"""The arithmetic of decode_int4.cuh, step by step on the CPU, against fp64 over the same cache.

Zeros meet sums instead of numbers there, and a tensor core drops what its accumulator cannot hold:
neither may cost more than a small part of what the quantisation itself does.
"""

import math

import pytest
import torch
from fixtures.tiers import quick_of
from slipstream.kernels.cache import kv_format
from torch import Tensor

HEAD, GROUP, STEP = 128, 64, 16  # numbers of a head, of a group, of a product of matrices
WHOLE, RAISED, MARGIN = 2.0**24, 128.0, 1.0  # decode_int4.cuh, decode_sums.cuh


def halves(x: Tensor) -> Tensor:
    """Rounded to float16; fp64."""
    return x.half().double()


def truncated(x: Tensor) -> Tensor:
    """Cut off to float32; fp64."""
    near = x.float()
    smaller = torch.nextafter(near, torch.zeros_like(near))
    return torch.where(near.double().abs() > x.abs(), smaller, near).double()


def accumulate(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """`total + a @ b`, cut off after every `STEP` of what is summed over."""
    result = torch.zeros(len(a), b.shape[1], dtype=torch.float64) if total is None else total
    for begin in range(0, a.shape[1], STEP):
        result = truncated(result + a[:, begin : begin + STEP] @ b[begin : begin + STEP])
    return result


class Stored:
    """Rows `[n, d]` as they lie in the cache."""

    def __init__(self, x: Tensor) -> None:
        numbers, scales = kv_format.quantize(x, torch.uint8)
        self.n = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2).double()
        self.codes = scales[:, ::2]
        self.zeros = scales[:, 1::2].view(torch.int8).double()
        self.scales = ((self.codes.int() + 840) << 20).view(torch.float32).double()
        self.values = kv_format.dequantize(numbers, scales, torch.uint8).double()


ODD = torch.arange(HEAD) % 2  # 1: of numbers in upper halves of a byte, which count 16 times


def scores_of(q: Tensor, k: Stored) -> Tensor:
    factor = 16.0 ** -ODD.double()
    halved = halves(q * factor)
    result = torch.zeros(len(k.n), len(q), dtype=torch.float64)
    for group in range(HEAD // GROUP):
        at = slice(group * GROUP, (group + 1) * GROUP)
        sums = (halved[:, at] / factor[at] / 16).float().sum(-1).double()
        most = halves(sums)
        parts = torch.stack((-most, halves(most - sums)))
        zeros = k.zeros[:, group, None].expand(-1, 2) * 2.0**-20
        own = accumulate(zeros, parts)
        own = accumulate(k.n[:, at] / WHOLE / factor[at], halved[:, at].T, own)
        result += (own * k.scales[:, group, None] * WHOLE).float()
    return result


def attend(q: Tensor, k: Stored, v: Stored, scale: float) -> Tensor:
    """Attend as the kernel does, over all tokens of one sequence: `[queries, d]`."""
    scores = scores_of(q, k) * (scale * math.log2(math.e))
    exponentials = torch.exp2(scores - scores.amax(0) - MARGIN).float()
    weights, totals = halves(exponentials), exponentials.double().sum(0)
    out = torch.empty(len(q), HEAD, dtype=torch.float64)
    for group in range(HEAD // GROUP):
        at = slice(group * GROUP, (group + 1) * GROUP)
        own = halves(weights * (v.scales[:, group, None] * RAISED)).T
        zeros = accumulate(own, v.zeros[:, group, None] * 2.0**-20) / 16
        factor = 16.0 ** ODD[at].double()
        sums = accumulate(own, v.n[:, at] / WHOLE * factor) / factor
        out[:, at] = (sums - zeros) * (WHOLE / RAISED) / totals[:, None]
    return out


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.softmax(q.double() @ k.double().T * scale, -1) @ v.double()


def make(kind: str, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(kind))
    q, k, v = (torch.randn(n, HEAD, generator=generator) for n in (4, num_tokens, num_tokens))
    if kind == "one-sided":
        k[:, ::32] += 20
        v += 6
    elif kind == "outliers":
        k[:, ::32] *= 20
        v[:, 5] *= 30
    elif kind == "tiny":
        v *= 2.0**-17
    elif kind == "huge":
        k *= 2.0**-8
        v *= 2000.0
    elif kind == "alike":  # every token has its part: what is cut off adds up
        q *= 0.01
    return q.half().float(), k, v


@pytest.mark.parametrize("num_tokens", quick_of([100, 16384], [100]))
@pytest.mark.parametrize("kind", ["random", "one-sided", "outliers", "tiny", "huge", "alike"])
def test_less_is_lost_than_by_the_format(kind: str, num_tokens: int) -> None:
    q, k, v = make(kind, num_tokens)
    scale = HEAD**-0.5
    stored = Stored(k), Stored(v)
    want = exact(q, stored[0].values, stored[1].values, scale)
    lost = (want - exact(q, k, v, scale)).norm()
    wrong = (attend(q, *stored, scale) - want).norm()
    assert float(wrong / lost) < 0.1, (float(wrong), float(lost), float(want.norm()))


def test_scales_as_float16() -> None:
    """`Codes::raised_scales`: exact of all scales below 512, the smallest are subnormal."""
    codes = torch.arange(256, dtype=torch.int32)
    meanings = ((codes + 840) << 20).view(torch.float32)
    pairs = torch.stack((codes * 128, codes * 64 + 0x200)).to(torch.int16)
    got = pairs.view(torch.float16).float().amax(0)
    are_large = (codes + 8) & 0x100 != 0
    assert torch.equal(are_large, ~(meanings < 512))
    assert torch.equal(got[~are_large], meanings[~are_large] * RAISED)
    assert float(meanings[:255].max()) * RAISED * 2.0**-MARGIN < torch.finfo(torch.float16).max
