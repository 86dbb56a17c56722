"""Attention of chunks over caches in fewer bits: its CUDA source, emulated, against fp64."""

from typing import NamedTuple

import pytest
import torch
from fixtures.kernels.attention_cases import attend, in_format, make_case, poison_bytes
from fixtures.kernels.checking import Judge
from fixtures.kernels.emulation import emulate
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.cache.kv_format import FORMATS

pytestmark = pytest.mark.rest  # a compiler's second, before anything runs

# A chunk of two CTAs, one that begins within a tile, and a token.
CHUNKS, LENGTHS = [3, 0, 17, 1, 70, 0], [3, 40, 60, 33, 90, 0]
HEADS = ((4, 2), (3, 1), (3, 3))


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    name: str  # of the cache's format
    head_size: int
    dtype: torch.dtype
    window: int


# Accesses of 16, 8 and 4 bytes; scales of a thread's own, and of wide heads by lanes.
VARIANTS = (
    Variant("fp8", 96, torch.float16, 20),
    Variant("int4", 96, torch.bfloat16, 0),
    Variant("int8", 64, torch.float32, 0),
    Variant("int4", 256, torch.bfloat16, 33),
)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_chunks(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    name, head_size, dtype, window = variant
    judge = Judge(str(variant))
    for seed, (heads, block) in enumerate(zip(HEADS, (16, 32, 256), strict=True)):
        sizes = (heads, head_size, block, dtype, "cpu", seed, window)
        case, left = in_format(make_case(CHUNKS, LENGTHS, *sizes), FORMATS[name])
        poison_bytes(case)
        out = torch.full(case.q.shape, torch.nan, dtype=dtype)
        where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
        prefill_attention.launcher(case.q, *where, max(CHUNKS), out, window)
        exact, naive = attend(left, torch.float64), attend(left, dtype)
        judge.close(f"heads {heads} block {block}", out, exact, naive)
    judge.verdict()
