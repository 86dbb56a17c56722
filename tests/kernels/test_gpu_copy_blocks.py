"""Copies of blocks on a GPU, within it and to and from pinned memory, bit for bit, repeated."""

import pytest
import torch
from kernels.checking import Judge, same_bits
from slipstream.kernels.copy_blocks import copy_blocks, route
from slipstream.kernels.op import KernelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
# Parts of a block as caches have them: one size a layer; data with scales; sizes that end in the
# middle of a chunk of 16 KB, and ones that are smaller.
LAYOUTS: dict[str, list[tuple[int, ...]]] = {
    "three layers": [(8, 2, 32, 128)] * 3,
    "data and scales": [(4, 2, 32, 128), (4, 2, 32)] * 2,
    "ragged": [(1, 2, 8, 80), (1, 1, 8), (3, 2, 64, 96)],
    "many": [(2, 2, 8, 64)] * 40,
}


def make(n: int, layout: str, where: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(-(1 << 15), 1 << 15, (n, *shape), generator=generator).to(torch.int16)
        for shape in LAYOUTS[layout]
    ]
    return [part.cuda() if where == "device" else part.pin_memory() for part in parts]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ends", ["device device", "device host", "host device"])
def test_copies(layout: str, ends: str) -> None:
    judge = Judge(f"copy_blocks {layout} {ends}")
    source_end, destination_end = ends.split()
    for count, max_ctas in ((1, 0), (1, 1), (7, 0), (7, 3), (60, 0), (60, 32)):
        sources = make(61, layout, source_end, seed=count)
        before = make(75, layout, "host", seed=100 + count)
        order = torch.randperm(75, generator=torch.Generator().manual_seed(count))[:count]
        picks = torch.randint(61, (count,), generator=torch.Generator().manual_seed(count))
        pairs = torch.stack((picks, order), 1).int()
        want = [part.clone() for part in before]
        for source, part in zip(sources, want, strict=True):
            part[order] = source.cpu()[picks]
        for repetition in range(5):
            destinations = make(75, layout, destination_end, seed=100 + count)
            way = route(sources, destinations, torch.device("cuda", 0))
            copy_blocks(pairs.cuda(), way, max_ctas)
            torch.cuda.synchronize()
            for number, (part, right) in enumerate(zip(destinations, want, strict=True)):
                case = f"{count} pairs, {max_ctas} CTAs, part {number}, time {repetition}"
                judge.true(case, same_bits(part.cpu(), right))
    judge.verdict()


def test_what_does_not_fit_vectors_is_refused() -> None:
    device = torch.device("cuda", 0)
    odd = torch.zeros(4, 12, dtype=torch.int16, device=device)
    with pytest.raises(KernelError, match="16 bytes"):
        route([odd], [odd.clone()], device)
    way = route([odd.view(6, 8)], [odd.view(6, 8)], device)
    copy_blocks(torch.zeros((0, 2), dtype=torch.int32, device=device), way)
