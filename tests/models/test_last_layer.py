"""The last layer: keys and values of all tokens, all else of those that are sampled."""

import random
from typing import Any

import pytest
import torch
from fixtures.models.checkpoints import DEVICES, make_model, make_runner, ragged_batch, save
from fixtures.tiers import quick_of
from slipstream.core.batch import Batch
from slipstream.layers.attention import AttentionInputs
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.streaming import StreamingInputs
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.step_shape import StepShape

SIZES = {"hidden_size": 128, "intermediate_size": 256}
GROUPS = {
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
KINDS = {
    "llama": ("llama", {}, {}),
    "bf16": ("qwen3", {}, {"dtype": "bfloat16"}),
    "windows": ("gemma3", GROUPS, {}),
    "sinks": ("llama", {}, {"attention_window": 96, "sink_tokens": 4}),
    "fp8": ("llama", {}, {"quantization": "fp8", "dtype": "bfloat16"}),
    "int8 cache": ("llama", {}, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
    "deterministic": ("llama", {}, {"deterministic": True}),
    "deterministic fp8": (
        "llama",
        {},
        {"deterministic": True, "quantization": "fp8", "dtype": "bfloat16"},
    ),
}
STEPS = [  # decodes, then chunks: tokens, and tokens before them
    (0, [(40, 0)]),
    (0, [(7, 30), (1, 12), (60, 0)]),
    (3, [(1, 50), (1, 1), (1, 33), (20, 16)]),
    (5, [(1, 8), (1, 70), (1, 3), (1, 64), (1, 15), (9, 60), (2, 0), (33, 31)]),
    (2, [(1, 40), (1, 9), (150, 20), (12, 3)]),
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=KINDS)
def runner(
    request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory
) -> ModelRunner:
    family, changes, options = KINDS[request.param]
    model = make_model(family, **SIZES, **changes)
    directory = save(model, tmp_path_factory.mktemp("last"))
    return make_runner(directory, device=device, kv_cache_tokens=2048, block_size=16, **options)


def shape_of(runner: ModelRunner, batch: Batch) -> StepShape:
    """In which the engine computes it."""
    exact = runner._builder.layout.shape_of(batch)
    return runner._graph_shape(exact, {}) or exact


@torch.inference_mode()
def step(
    runner: ModelRunner, batch: Batch, computes_all: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the cache as the step left it; the last layer may compute all and be cut."""
    generator = torch.Generator().manual_seed(3)
    if runner._cache.is_floating_point():
        runner._cache.copy_(torch.randn(runner._cache.shape, generator=generator))
    else:
        runner._cache.zero_()  # bytes of any kind would be scales of any kind
    shape = shape_of(runner, batch)
    arrays = runner._builder.build(batch, shape, 0, 0)
    staged = runner._stage(arrays)
    with pytest.MonkeyPatch.context() as patch:
        for inputs in (AttentionInputs, StreamingInputs) if computes_all else ():
            patch.setattr(inputs, "of_last_layer", lambda self, *_: self)
        logits = runner._forward(shape, staged)
    if computes_all:
        assert len(logits) == shape.num_tokens
        logits = logits[arrays.sample_rows]
    return logits[arrays.samples].float(), runner._cache.clone()


@pytest.mark.parametrize("seed", quick_of(range(6), [0]))
@pytest.mark.parametrize(("num_decodes", "sizes"), STEPS, ids=str)
def test_it_gives_what_computing_all_gives(
    runner: ModelRunner, num_decodes: int, sizes: list[tuple[int, int]], seed: int
) -> None:
    batch, _ = ragged_batch(runner, random.Random(seed), sizes, num_decodes)
    logits, cache = step(runner, batch)
    expected, expected_cache = step(runner, batch, computes_all=True)
    assert torch.equal(cache.view(torch.uint8), expected_cache.view(torch.uint8))
    if runner._builder.layout.has_decodes:
        tolerance = 2e-5 if runner._cache.dtype == torch.float32 else 0.06
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=tolerance)
    else:
        assert torch.equal(logits, expected), "deterministic"


def test_no_more_rows_than_are_asked_for(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = type(runner._model.blocks[-1].mlp)
    multiply, seen = mlp.__call__, []

    def counted(self: Any, norm: Norm, residual: Residual) -> None:
        seen.append(len(residual))
        multiply(self, norm, residual)

    monkeypatch.setattr(mlp, "__call__", counted)
    monkeypatch.setattr(runner._model, "whole", None)  # blocks one by one
    num_decodes, sizes = STEPS[-1]
    batch, _ = ragged_batch(runner, random.Random(1), sizes, num_decodes)
    shape = shape_of(runner, batch)
    assert shape.num_samples < shape.num_tokens
    runner.logits(batch)
    assert len(seen) == len(runner._model.blocks)
    assert seen[:-1] == [shape.num_tokens] * (len(seen) - 1)
    assert seen[-1] == shape.num_samples
