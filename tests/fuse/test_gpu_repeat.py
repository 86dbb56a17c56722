"""Repeated blocks on a GPU: the bits of blocks that are launched one by one."""

import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fixtures.kernels.checking import same_bits
from fixtures.models.checkpoints import make_model, make_runner, ragged_batch, save
from fixtures.models.gpu_sizes import OWN, SIZES
from slipstream.fuse.recording import Recording
from slipstream.layers.decoder import one_by_one
from slipstream.runner.model_runner import ModelRunner
from torch import Tensor

pytestmark = pytest.mark.gpu

DEVICE, LAYERS = "cuda", 6
SETTINGS = {"max_num_batched_tokens": 2048, "max_num_seqs": 700, "max_model_len": 1024}
STEPS = [([(600, 0)], 0), ([(300, 0), (1, 0), (700, 0)], 0), ([(1, 0)] * 600, 600)]
STEPS += [([*[(1, 0)] * 20, (900, 0)], 20)]


@torch.inference_mode()
def states(runner: ModelRunner, sizes: list[tuple[int, int]], decodes: int) -> list[Tensor]:
    """Return the logits of a step, and the cache behind it."""
    batch, _ = ragged_batch(runner, random.Random(0), sizes, decodes)
    runner._cache.zero_()
    return [runner.logits(batch), runner._cache.clone()]


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *[("llama", scheme) for scheme in ("none", "fp8", "int4", "w4a8", "w8a8")],
        *[("qwen3", "none"), ("phi3", "fp8"), ("qwen3_moe", "none")],
        *[("mixtral", scheme) for scheme in ("none", "fp8")],
        *[(family, "none") for family in ("qwen2", "gemma2", "gemma3", "gpt_oss", "glm4", "olmo2")],
        *[("deepseek_v3", "none"), ("gpt2", "none"), ("qwen2", "w4a8")],
    ],
)
def test_repeated_blocks_have_the_bits_of_each(family: str, scheme: str, tmp_path: Path) -> None:
    """Compare a family of each structure; torch has a part in the blocks of some."""
    sizes = SIZES | {"num_hidden_layers": LAYERS, "max_position_embeddings": 1024}
    model = make_model(family, **(sizes | OWN.get(family, {})))
    given = {"device": DEVICE, "dtype": "bfloat16", "block_size": 16, "kv_cache_tokens": 16384}
    given |= SETTINGS | {"cuda_graphs": False, "quantization": scheme}
    runner = make_runner(save(model, tmp_path), **given)
    repeating = runner._model.in_turn
    for step in STEPS:
        runner._model.in_turn = one_by_one
        expected = states(runner, *step)
        runner._model.in_turn = repeating
        with patch.object(Recording, "repeat", autospec=True, side_effect=Recording.repeat) as made:
            found = states(runner, *step)
        assert made.call_count >= LAYERS // 3
        assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True)), step
        assert all(torch.isfinite(x.float()).all() for x in found[:1])
