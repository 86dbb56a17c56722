"""The copies of blocks with which a step begins, in every layer."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import DEVICES, make_model, make_runner, save
from slipstream.core.batch import Batch


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_a_step_begins_with_its_copies(device: str, tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64, num_hidden_layers=3)
    runner = make_runner(save(model, tmp_path / "Tiny"), device=device, kv_cache_tokens=80)
    before = []
    for layer, cache in enumerate(runner._caches):
        cache.copy_(torch.arange(cache.numel()).view(cache.shape) + layer)
        before.append(cache.clone())
    runner._copy_blocks(Batch((), 0, copies=((1, 7), (1, 2), (9, 0))))
    for cache, old in zip(runner._caches, before, strict=True):
        for target, source in enumerate([9, 1, 1, 3, 4, 5, 6, 1, 8, 9]):
            assert torch.equal(cache[target], old[source])
