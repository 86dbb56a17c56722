"""Decode attention in every legal configuration: against fp64, poisoned, repeated bitwise."""

import pytest
import torch
from kernels.attention_cases import Case, attend, configurations, make_case
from kernels.checking import DTYPES, Judge, bits, poison, same_bits, short
from slipstream.kernels.decode_attention import decode_attention, plan_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def decode(case: Case) -> torch.Tensor:
    plan = plan_decode(case.lengths, case.cache, case.q.shape[1])
    return decode_attention(case.q, case.cache, case.block_tables, case.lengths, plan, case.scale)


LENGTHS = [1, 2, 7, 31, 33, 0, 77, 256, 257, 1000, 1100, 64, 5000, 8193]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_decode_attention(dtype: torch.dtype) -> None:
    judge = Judge(f"decode_attention {short(dtype)}")
    for heads, d, block in configurations():
        name = f"heads {heads} d {d} block {block}"
        case = make_case([1] * len(LENGTHS), LENGTHS, heads, d, block, dtype)

        def run(case=case) -> torch.Tensor:
            poison(case.q.shape, dtype=dtype)
            return decode(case)

        out = run()
        judge.close(name, out, attend(case, torch.float64), attend(case, dtype))
        judge.true(f"{name}: length 0", not out[LENGTHS.index(0)].any())
        judge.repeats(name, run)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_long_decode(dtype: torch.dtype) -> None:
    judge = Judge(f"long decode {short(dtype)}")
    lengths = [33001, 300, 20000]
    case = make_case([1] * 3, lengths, (8, 2), 128, 32, dtype)
    out = decode(case)
    judge.close(f"{lengths}", out, attend(case, torch.float64), attend(case, dtype))
    judge.verdict()


def test_streams_and_graphs() -> None:
    """Kernels run on torch's current stream; a captured graph reads its inputs at replay."""
    judge = Judge("streams and graphs")
    lengths = [300, 1, 1000, 64]
    case = make_case([1] * 4, lengths, (8, 2), 128, 32, torch.bfloat16)
    want = decode(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-2
        got = decode(case)
    stream.synchronize()
    judge.true("side stream", same_bits(got, want))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(case)
    for change in ([1, 300, 64, 0], [1000, 999, 257, 30]):
        fitting = torch.minimum(torch.tensor(change), torch.tensor(lengths))
        case.lengths.copy_(fitting)
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        judge.true(f"graph {change}", same_bits(captured, decode(case)))
        assert bits(captured).ndim == 3
    judge.verdict()
