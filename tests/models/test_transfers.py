"""Copies between the cache and host memory: of the right bytes, told when they have ended."""

import pytest
import torch
from models.checkpoints import DEVICES
from slipstream.engine.host import Direction
from slipstream.engine.transfers import Transfers, host_block_bytes
from slipstream.errors import ConfigError


def parts_on(device: str, num_blocks: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 2, 8, 64), (2, 2, 8), (1, 2, 16, 80)]
    dtypes = [torch.float16, torch.float16, torch.int8]
    return [
        torch.randint(-100, 100, (num_blocks, *shape)).to(dtype).to(device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_in_again_elsewhere(device: str) -> None:
    parts = parts_on(device, 300)
    transfers = Transfers(parts, 200)
    before = [part.clone() for part in parts]
    assert transfers.block_bytes == host_block_bytes(parts) >= sum(p[0].nbytes for p in parts)
    assert transfers.num_bytes == 200 * transfers.block_bytes
    count = transfers.max_pairs
    out = [(2 * i, 199 - i) for i in range(count)]
    transfers.begin(Direction.OUT, out)
    transfers.wait()
    assert transfers.num_ended(Direction.OUT) == 1
    assert transfers.num_ended(Direction.IN) == 0
    for part in parts:
        part.fill_(77)
    if device == "cuda":
        torch.cuda.synchronize()
    back = [(slot, 299 - block) for block, slot in out]
    transfers.begin(Direction.IN, back[:3])
    transfers.begin(Direction.IN, back[3:])
    while transfers.num_ended(Direction.IN) < 2:
        transfers.wait()
    for part, right in zip(parts, before, strict=True):
        for block, _ in out:
            assert torch.equal(part[299 - block], right[block])
        untouched = sorted(set(range(300)) - {299 - block for block, _ in out})
        assert bool((part[untouched] == 77).all())
    for direction in Direction:
        rate = transfers.rate(direction)
        assert rate is not None
        assert rate > 0


@pytest.mark.parametrize("device", DEVICES)
def test_many_copies_at_once(device: str) -> None:
    parts = parts_on(device, 200)
    transfers = Transfers(parts, 200)
    before = [part.clone() for part in parts]
    for block in range(200):
        transfers.begin(Direction.OUT, [(block, 199 - block)])
    while transfers.num_ended(Direction.OUT) < 200:
        transfers.wait()
    for slot in range(200):
        transfers.begin(Direction.IN, [(slot, slot)])
    while transfers.num_ended(Direction.IN) < 200:
        transfers.wait()
    for part, right in zip(parts, before, strict=True):
        assert torch.equal(part, right.flip(0))


def test_on_a_cpu_a_copy_is_told_at_the_next_look() -> None:
    transfers = Transfers(parts_on("cpu", 3), 2)
    assert transfers.rate(Direction.OUT) is None
    assert transfers.num_ended(Direction.OUT) == 0
    transfers.begin(Direction.OUT, [(1, 1)])
    assert transfers.num_ended(Direction.OUT) == 1


def test_memory_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="kv_cache_host_bytes"):
        Transfers(parts_on("cpu", 3), 1 << 50)
