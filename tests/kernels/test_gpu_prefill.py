"""Prefill attention in every legal configuration: against fp64, poisoned, repeated bitwise."""

import pytest
import torch
from kernels.attention_cases import HEAD_SIZES, attend, configurations, make_case
from kernels.checking import DTYPES, Judge, poison, same_bits, short
from slipstream.kernels.prefill_attention import prefill_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

CHUNKS = [1, 5, 0, 64, 65, 100, 17, 128, 1, 33, 3]
CHUNK_LENGTHS = [1, 5, 50, 64, 65, 300, 2049, 1000, 777, 33, 259]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_prefill_attention(dtype: torch.dtype) -> None:
    judge = Judge(f"prefill_attention {short(dtype)}")
    for heads, d, block in configurations():
        name = f"heads {heads} d {d} block {block}"
        case = make_case(CHUNKS, CHUNK_LENGTHS, heads, d, block, dtype)

        def run(case=case) -> torch.Tensor:
            poison(case.q.shape, dtype=dtype)
            return prefill_attention(
                case.q,
                case.cache,
                case.block_tables,
                case.query_starts,
                case.lengths,
                case.scale,
                max(CHUNKS),
            )

        judge.close(name, run(), attend(case, torch.float64), attend(case, dtype))
        judge.repeats(name, run)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_chunks_change_nothing(dtype: torch.dtype) -> None:
    """A prompt cut anywhere gives a row the same bits: tiles of keys always start at token 0."""
    judge = Judge(f"chunk cuts {short(dtype)}")
    length = 300
    for d in HEAD_SIZES:
        whole = make_case([length], [length], (6, 2), d, 16, dtype)
        arguments = (whole.q, whole.cache, whole.block_tables)
        want = prefill_attention(*arguments, whole.query_starts, whole.lengths, whole.scale, length)
        for size in (1, 7, 63, 64, 65, 128, 299):
            for start in range(0, length, size):
                end = min(length, start + size)
                got = prefill_attention(
                    whole.q[start:end],
                    whole.cache,
                    whole.block_tables,
                    torch.tensor([0, end - start], dtype=torch.int32, device="cuda"),
                    torch.tensor([end], dtype=torch.int32, device="cuda"),
                    whole.scale,
                    end - start,
                )
                judge.true(f"d {d} rows {start}:{end}", same_bits(got, want[start:end]))
    judge.verdict()
