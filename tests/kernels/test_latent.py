"""Latent attention: the oracle against fp64, and the CUDA source, emulated, against both."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.latent_cases import LatentCase, expected, latent_call, rows_call
from fixtures.tiers import quick_of
from slipstream.kernels.attention import latent
from slipstream.kernels.attention.latent import latent_attention, num_splits, shapes
from slipstream.kernels.attention.latent_rows import latent_rows
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError

BF16, FP32 = torch.bfloat16, torch.float32
BOUNDS = {FP32: 2e-5, BF16: 0.02}
CASES = {
    "decodes, 16 heads": LatentCase(16, [5, 0, 33, 64, 300]),
    "decodes in parts": LatentCase(12, [5, 0, 33, 300], splits=True),
    "decodes, 40 heads": LatentCase(40, [129, 70], splits=True),
    "decodes, 128 heads": LatentCase(128, [65, 200], splits=True, block_size=64),
    "chunks, 64 heads": LatentCase(64, [65, 40, 7, 0], [3, 2, 7, 0]),
    "chunks in parts": LatentCase(20, [40, 290, 0], [5, 9, 0], splits=True, block_size=8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_oracle(case: LatentCase) -> None:
    call = latent_call(case, FP32)
    torch.testing.assert_close(latent_attention(*call).double(), expected(call), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", quick_of([BF16, FP32], [BF16]), ids=str)
@pytest.mark.parametrize("name", quick_of(CASES, {"decodes in parts"}))
def test_the_kernel(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    call = latent_call(CASES[name], dtype)
    found = latent_attention.launcher(*call)
    torch.testing.assert_close(found.double(), expected(call), atol=BOUNDS[dtype], rtol=0)


def test_bits_depend_on_position_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded token, or one in a chunk with others, has the same bits beside other sequences."""
    emulate(monkeypatch)
    chunk = latent_call(LatentCase(16, [70, 75], [3, 10]), BF16)
    together = latent_attention.launcher(*chunk)
    for row, length in ((3, 66), (12, 75)):
        lengths = torch.tensor([length], dtype=torch.int32)
        out = torch.empty_like(chunk.out[:1])
        where = (chunk.q[row : row + 1], chunk.cache, chunk.block_tables[1:], None, lengths, out)
        alone = latent_attention.launcher(*where, chunk.scale)
        assert torch.equal(alone[0], together[row])


def test_small_memory_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    limit = 99 * 1024
    monkeypatch.setattr(jit, "shared_memory_limit", lambda _: limit)
    call = latent_call(LatentCase(64, [40]), BF16)
    found = latent_attention.launcher(*call)
    torch.testing.assert_close(found.double(), expected(call), atol=BOUNDS[BF16], rtol=0)
    for dtype in jit.DTYPES:
        assert shapes(dtype, 128)[-1].shared_memory(dtype, 576) <= limit
        needed = [shape.shared_memory(dtype, 576) for shape in shapes(dtype, 128)]
        assert needed == sorted(needed, reverse=True)
        assert needed[0] <= 163 * 1024, "an A100 has the first"


def test_parts_fill_the_gpu_and_no_more() -> None:
    assert num_splits(1, 1 << 20, 132) == 64
    assert num_splits(1, 300, 132) == 3  # of 128 tokens at least
    assert num_splits(66, 1 << 20, 132) == 4
    assert num_splits(1000, 1 << 20, 132) == 1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", quick_of([BF16, FP32], [BF16]), ids=str)
def test_rows(dtype: torch.dtype, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    wanted, found = (rows_call(5, dtype, interleaved) for _ in range(2))
    latent_rows.oracle(*wanted)
    latent_rows.launcher(*found)
    bound = {"atol": 1e-6 if dtype == FP32 else 0.0, "rtol": 2e-6 if dtype == FP32 else 0.008}
    torch.testing.assert_close(found.cache, wanted.cache, **bound)
    torch.testing.assert_close(found.out, wanted.out, **bound)
    assert wanted.cache.count_nonzero() > 5 * 500


def test_what_has_no_kernel_is_refused() -> None:
    call = latent_call(LatentCase(4, [5]), BF16)
    with pytest.raises(KernelError, match=r"a cache of torch\.float8_e4m3fn for"):
        latent_attention.launcher(*call._replace(cache=call.cache.to(torch.float8_e4m3fn)))
    with pytest.raises(KernelError, match="no kernels of latents of 256 and 320"):
        latent_attention.launcher(*call._replace(out=call.out[..., :256]))
    assert {dict(v.defines)["ROWS"] for v in latent.variants()} == {"8", "16", "32", "64"}
