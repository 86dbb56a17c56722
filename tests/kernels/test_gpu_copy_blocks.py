"""Copies of blocks on a GPU, bit for bit, repeated."""

import pytest
import torch
from fixtures.kernels.checking import Judge, same_bits
from slipstream.kernels.cache.copy_blocks import copy_blocks
from slipstream.kernels.runtime.op import KernelError

pytestmark = pytest.mark.gpu
# Caches of 61 blocks: parts of whole chunks of 16 KB, ones that end in the middle, smaller ones.
SHAPES = [(3, 61, 8, 2, 32, 128), (2, 61, 3, 2, 64, 96), (40, 61, 2, 2, 8, 64), (1, 61, 1, 1, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies(shape: tuple[int, ...]) -> None:
    judge = Judge(f"copy_blocks {shape}")
    for count in (1, 7, 30):
        generator = torch.Generator().manual_seed(count)
        before = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
        order = torch.randperm(61, generator=generator)
        sources = order[torch.randint(31, (count,), generator=generator)]
        pairs = torch.stack((sources, order[31 : 31 + count]), 1).int()
        want = before.clone()
        want[:, order[31 : 31 + count]] = before[:, sources]
        for repetition in range(20):
            cache = before.cuda()
            copy_blocks(pairs.cuda(), cache)
            judge.true(f"{count} pairs, time {repetition}", same_bits(cache.cpu(), want))
    judge.verdict()


def test_what_does_not_fit_vectors_is_refused() -> None:
    pairs = torch.zeros((0, 2), dtype=torch.int32, device="cuda")
    with pytest.raises(KernelError, match="24 bytes are not aligned to 16"):
        copy_blocks(pairs, torch.zeros(2, 4, 12, dtype=torch.int16, device="cuda"))
    with pytest.raises(KernelError, match="contiguous"):
        copy_blocks(pairs, torch.zeros(2, 4, 16, dtype=torch.int16, device="cuda")[:, :3])
    copy_blocks(pairs, torch.zeros(2, 4, 16, dtype=torch.int16, device="cuda"))
