"""On a GPU in bf16: each family at a size that tensor cores take, beside the CPU in fp32.

The same weights, rounded to bf16 for both. The bound is of the root mean square of what logits
differ by, over their deviation: what rounding of activations costs models of this size, which is
below 0.02 of most.
"""

import itertools
import random
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    FAMILIES,
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
    sizes_of,
)
from fixtures.models.gpu_sizes import OWN, SIZES
from fixtures.models.remote_drawn import REMOTE
from slipstream.models.hf import read_config

pytestmark = pytest.mark.gpu
BOUND = 0.05
# A row may have other experts than in fp32, where two scores are near.
BOUND_OF_EXPERTS = 0.3


def _size(config: object) -> int:
    return getattr(config, "hidden_size", 0) or config.d_model  # type: ignore[attr-defined]


def checkpoint(family: str, path: Path) -> Path:
    """Write a checkpoint in bf16."""
    if family not in FAMILIES:
        drawn = (REMOTE[family](random.Random(f"{family} {seed}")) for seed in itertools.count())
        model = next(each for each in drawn if _size(each.config) % 16 == 0)
        model.tensors = {name: x.bfloat16() for name, x in model.tensors.items()}
        return model.save(path)
    sizes = sizes_of(family, **SIZES) | OWN.get(family, {})
    return save(make_model(family, **sizes).bfloat16(), path)


@pytest.mark.parametrize("family", sorted({*FAMILIES, *REMOTE}))
def test_logits_beside_the_cpu(family: str, tmp_path: Path) -> None:
    checkpoint(family, tmp_path)
    config = read_config(tmp_path)
    prompts = random_prompts([37, 1, 90, 8, 160], config.dims.vocab_size)
    on_gpu = [Generation(prompt, 6 + i) for i, prompt in enumerate(prompts)]
    runner = make_runner(tmp_path, device="cuda", dtype="bfloat16", block_size=16)
    driver = Driver(runner, keep_logits=True)
    driver.step(on_gpu[:1], 7)
    driver.finish(on_gpu, chunk=50)
    # What the GPU said first and last, on its own tokens.
    told = [(each.prompt, each.logits[0]) for each in on_gpu]
    told += [(each.tokens[:-1], each.logits[-1]) for each in on_gpu]
    on_cpu = [Generation(tokens, 1) for tokens, _ in told]
    Driver(make_runner(tmp_path, dtype="float32"), keep_logits=True).finish(on_cpu)
    ours = torch.stack([logits for _, logits in told]).double().cpu()
    truth = torch.stack([each.logits[0] for each in on_cpu]).double()
    error = (ours - truth).pow(2).mean().sqrt() / truth.std()
    assert error <= (BOUND if config.axes.experts is None else BOUND_OF_EXPERTS)
