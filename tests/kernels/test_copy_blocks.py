"""Copies of blocks: the reference against plain indexing, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.checking import same_bits
from slipstream.kernels.copy_blocks import copy_blocks, route
from slipstream.kernels.op import KernelError

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_part_of_every_pair_and_nothing_else(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    shapes = [(2, 2, 8, 16), (2, 2, 8), (1,)]
    dtypes = [torch.float32, torch.float8_e4m3fn, torch.int8]
    num_sources, num_destinations = (data.draw(st.integers(1, 9)) for _ in range(2))
    sources, destinations = (
        [
            torch.randint(-100, 100, (n, *shape)).to(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        for n in (num_sources, num_destinations)
    )
    count = data.draw(st.integers(0, num_destinations))
    pairs = [(int(torch.randint(num_sources, ())), b) for b in torch.randperm(num_destinations)]
    want = [destination.clone() for destination in destinations]
    for a, b in pairs[:count]:
        for source, destination in zip(sources, want, strict=True):
            destination[b] = source[a]
    way = route(sources, destinations, CPU)
    copy_blocks(torch.tensor(pairs[:count], dtype=torch.int32).view(-1, 2), way)
    assert all(same_bits(a, b) for a, b in zip(destinations, want, strict=True))


def test_parts_that_do_not_fit_are_refused() -> None:
    part = torch.zeros(3, 8)
    with pytest.raises(KernelError, match="differ in number"):
        route([part], [], CPU)
    with pytest.raises(KernelError, match="32 and 36 bytes"):
        route([part], [torch.zeros(3, 9)], CPU)
    with pytest.raises(KernelError, match="contiguous"):
        route([torch.zeros(3, 8, 2).mT], [torch.zeros(3, 2, 8)], CPU)
    route([part[:, :3]], [torch.zeros(3, 3)], CPU)
