"""Copies of blocks: the reference against plain indexing."""

import torch
from fixtures.kernels.checking import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.cache.copy_blocks import copy_blocks


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_part_of_every_pair_and_nothing_else(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    num_parts, num_blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float8_e4m3fn, torch.int8]))
    cache = torch.randint(-100, 100, (num_parts, num_blocks, 2, 8)).to(dtype)
    order = torch.randperm(num_blocks).tolist()
    num_sources = data.draw(st.integers(1, num_blocks))
    count = data.draw(st.integers(0, num_blocks - num_sources))
    pairs = [
        (order[data.draw(st.integers(0, num_sources - 1))], order[num_sources + i])
        for i in range(count)
    ]
    want = cache.clone()
    for part in want:
        for a, b in pairs:
            part[b] = part[a]
    copy_blocks(torch.tensor(pairs, dtype=torch.int32).view(-1, 2), cache)
    assert same_bits(cache, want)
