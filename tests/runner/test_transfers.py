"""Copies between the cache and host memory: of the right bytes, told when they have ended."""

import pytest
import torch
from fixtures.models.checkpoints import DEVICES
from slipstream.errors import ConfigError
from slipstream.kvcache.host import Direction
from slipstream.runner.transfers import Transfers


def cache_on(device: str, num_blocks: int) -> torch.Tensor:
    """Three parts a block, of no power of two."""
    torch.manual_seed(0)
    shape = (3, num_blocks, 2, 2, 8, 80)
    return torch.randint(-(1 << 15), 1 << 15, shape).to(torch.int16).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_in_again_elsewhere(device: str) -> None:
    cache = cache_on(device, 300)
    transfers = Transfers(cache, 200)
    before = cache.clone()
    assert transfers.block_bytes == 3 * cache[0, 0].nbytes
    assert transfers.num_bytes == 200 * transfers.block_bytes
    count = transfers.max_pairs
    out = [(2 * i, 199 - i) for i in range(count)]
    transfers.start(Direction.OUT, out)
    transfers.wait()
    assert transfers.num_ended(Direction.OUT) == 1
    assert transfers.num_ended(Direction.IN) == 0
    cache.fill_(77)
    if device == "cuda":
        torch.cuda.synchronize()
    back = [(slot, 299 - block) for block, slot in out]
    transfers.start(Direction.IN, back[:3])
    transfers.start(Direction.IN, back[3:])
    while transfers.num_ended(Direction.IN) < 2:
        transfers.wait()
    for block, _ in out:
        assert torch.equal(cache[:, 299 - block], before[:, block])
    untouched = sorted(set(range(300)) - {299 - block for block, _ in out})
    assert bool((cache[:, untouched] == 77).all())
    for direction in Direction:
        rate = transfers.rate(direction)
        assert rate is not None
        assert rate > 0


@pytest.mark.parametrize("device", DEVICES)
def test_many_copies_at_once(device: str) -> None:
    cache = cache_on(device, 200)
    transfers = Transfers(cache, 200)
    before = cache.clone()
    for block in range(200):
        transfers.start(Direction.OUT, [(block, 199 - block)])
    while transfers.num_ended(Direction.OUT) < 200:
        transfers.wait()
    for slot in range(200):
        transfers.start(Direction.IN, [(slot, slot)])
    while transfers.num_ended(Direction.IN) < 200:
        transfers.wait()
    assert torch.equal(cache, before.flip(1))


@pytest.mark.gpu
def test_layers_that_lie_further_apart_than_2_gigabytes() -> None:
    cache = torch.zeros((2, 20_000, 1 << 17), dtype=torch.uint8, device="cuda")
    last = cache[:, -1].random_().clone()
    transfers = Transfers(cache, 2)
    transfers.start(Direction.OUT, [(19_999, 1)])
    transfers.wait()
    transfers.start(Direction.IN, [(1, 7)])
    transfers.wait()
    assert torch.equal(cache[:, 7], last)


def test_on_a_cpu_a_copy_is_told_at_the_next_look() -> None:
    transfers = Transfers(cache_on("cpu", 3), 2)
    assert transfers.rate(Direction.OUT) is None
    assert transfers.num_ended(Direction.OUT) == 0
    transfers.start(Direction.OUT, [(1, 1)])
    assert transfers.num_ended(Direction.OUT) == 1


def test_memory_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="kv_cache_host_bytes"):
        Transfers(cache_on("cpu", 3), 1 << 40)
