"""Sums over ranks on GPUs: of two that share one GPU, and of two GPUs with a model on them."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from slipstream.kernels.comm.all_reduce import (
    EMPTY_BYTES,
    GRID,
    MEMORY_BYTES,
    PACKS_AT,
    Peers,
    sum_into,
    sum_norm,
    total,
)
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream_serve.server import repository_root

pytestmark = pytest.mark.gpu
SIZES = (16, 8192, 65_536, 262_144, 262_160, 1 << 20, 8 << 20, 12 << 20)


class OneGpu:
    """Two ranks in streams of one GPU, whose kernels run at once."""

    def __init__(self) -> None:
        self._memory = [torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device="cuda") for _ in "ab"]
        for each in self._memory:
            each[PACKS_AT : PACKS_AT + EMPTY_BYTES] = 0xFF
        self._late = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        limit = torch.tensor([10**10], device="cuda")
        bases = tuple(each.data_ptr() for each in self._memory)
        self.streams = [torch.cuda.Stream() for _ in "ab"]  # type: ignore[no-untyped-call]
        self.peers = [
            Peers(bases, rank, torch.zeros(GRID, dtype=torch.int32, device="cuda"), limit, late)
            for rank, late in enumerate([self._late.data_ptr()] * 2)
        ]
        torch.cuda.synchronize()

    def ranks(self) -> Iterator[int]:
        """Yield the ranks, each while its stream is the current one."""
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                yield rank


@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
def test_sums_of_two_ranks_of_one_gpu(way: str) -> None:
    """A thousand calls of sizes in turn, as buffers are used again and again."""
    gpu = OneGpu()
    sizes = (8, 4096, 40_000, 131_072, 600_000, 4_194_304)
    given = [torch.randn(2, size, device="cuda").bfloat16() for size in sizes]
    wanted = [total(list(x)) for x in given]
    outs = [[torch.empty_like(x[0]) for x in given] for _ in gpu.streams]
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for call in range(1000):
        which = call % len(sizes)
        for rank in gpu.ranks():
            sum_into(gpu.peers[rank], way, given[which][rank], None, outs[rank][which])
        for rank in gpu.ranks():
            wrong[rank] += (outs[rank][which] != wanted[which]).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


def test_sums_and_norms_of_two_ranks_of_one_gpu() -> None:
    gpu = OneGpu()
    for num_rows, width in ((1, 4096), (128, 4096), (3, 16_384), (77, 8), (128, 8192)):
        x = torch.randn(2, num_rows, width, device="cuda").bfloat16()
        before = torch.randn(num_rows, width, device="cuda").bfloat16()
        weight = torch.rand(width, device="cuda").bfloat16()
        residuals, found = [before.clone(), before.clone()], []
        for rank in gpu.ranks():  # what is freed here is there below: nothing waits for the device
            torch.empty_like(x[rank])
        torch.cuda.synchronize()
        for rank in gpu.ranks():
            given = (gpu.peers[rank], x[rank], residuals[rank], RmsNorm(weight, 1e-5))
            found.append(sum_norm(*given))
        torch.cuda.synchronize()
        wanted = total(list(x), before)
        normed = rms_norm.oracle(wanted, weight, 1e-5, False).float()
        for rank in range(2):
            assert torch.equal(residuals[rank], wanted)
            torch.testing.assert_close(found[rank].float(), normed, atol=0.01, rtol=0.01)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two NVIDIA GPUs")
def test_sums_have_the_oracles_bits_and_a_model_runs_on_two_ranks() -> None:
    """And with one of them killed, all start again."""
    script = repository_root() / "benchmarks" / "tensor_parallel.py"
    options = (
        "--tensor-parallel",
        "2",
        "--models",
        "tiny",
        "--batches",
        "1",
        "8",
        "--tokens",
        "16",
    )
    parts = ("--prompt", "600", "--parts", "sums", "engine", "kill", "--sizes", *map(str, SIZES))
    result = subprocess.run(
        [sys.executable, str(script), *options, *parts],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert all(row["is_right"] for rank in found["sums"] for row in rank)
    assert found["tiny"]["engine"][0]["decode_8_ms"] > 0
