"""Latent attention on a GPU: against fp64, poisoned, in CUDA graphs, bitwise where it must be."""

import pytest
import torch
from fixtures.kernels.checking import DTYPES, poison, short
from fixtures.kernels.latent_cases import LatentCase, expected, latent_call, rows_call
from slipstream.kernels.attention.latent import LatentCall, latent_attention
from slipstream.kernels.attention.latent_rows import latent_rows

pytestmark = pytest.mark.gpu
BOUNDS = {torch.float32: 2e-5, torch.float16: 0.004, torch.bfloat16: 0.02}
LENGTHS = [0, 1, 31, 33, 128, 129, 1000, 4100]
CASES = [
    *(LatentCase(heads, LENGTHS, splits=splits) for heads in (12, 32, 128) for splits in (0, 1)),
    LatentCase(16, [9000], splits=True, block_size=64),
    LatentCase(128, [700, 65, 0], [130, 65, 0]),
    LatentCase(16, [3000, 65], [20, 2], splits=True, block_size=8),
]


def attend(call: LatentCall) -> torch.Tensor:
    poison((call.out.numel() // 512 * 64 * 514,), dtype=torch.float32)
    return latent_attention(*call)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_beside_fp64(dtype: torch.dtype) -> None:
    for seed, case in enumerate(CASES):
        call = latent_call(case, dtype, "cuda", seed)
        found = attend(call).double().cpu()
        torch.testing.assert_close(found, expected(call), atol=BOUNDS[dtype], rtol=0)
        assert torch.equal(attend(call).double().cpu(), found), "equal calls have equal bits"


def test_a_token_has_the_same_bits_in_any_chunk() -> None:
    call = latent_call(LatentCase(16, [700, 750], [300, 100]), torch.bfloat16, "cuda")
    together = latent_attention(*call)
    for row, length in ((300, 651), (399, 750)):
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        where = (call.q[row : row + 1], call.cache, call.block_tables[1:], None, lengths)
        alone = latent_attention(*where, torch.empty_like(call.out[:1]), call.scale)
        assert torch.equal(alone[0], together[row])


def test_in_a_graph_lengths_may_change() -> None:
    call = latent_call(LatentCase(128, [700, 350], splits=True), torch.bfloat16, "cuda")
    attend(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        latent_attention(*call)
    for lengths in ([3, 350], [700, 0], [129, 1]):
        call.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(call.out.double().cpu(), expected(call), atol=0.02, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows(dtype: torch.dtype, interleaved: bool) -> None:
    found = rows_call(128, dtype, interleaved, "cuda")
    latent_rows(*found)
    wanted = rows_call(128, dtype, interleaved)
    latent_rows.oracle(*wanted)
    bound = {"atol": 1e-5, "rtol": 1e-5 if dtype == torch.float32 else 0.008}
    torch.testing.assert_close(found.cache.cpu(), wanted.cache, **bound)
    torch.testing.assert_close(found.out.cpu(), wanted.out, **bound)
