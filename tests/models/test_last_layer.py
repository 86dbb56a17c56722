"""The last layer: keys and values of all tokens, all else of those that are sampled."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models.checkpoints import DEVICES, GREEDY, make_model, make_runner, save
from slipstream.engine.batch import Batch, Row
from slipstream.engine.runner import ModelRunner
from slipstream.layers.attention import AttentionInputs
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.streaming import StreamingInputs

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


def make_batch(
    runner: ModelRunner, rng: random.Random, num_decodes: int, sizes: list[tuple[int, int]]
) -> Batch:
    """Chunks sample or not; the cache holds what no step wrote."""
    blocks = list(range(runner.num_blocks))
    rng.shuffle(blocks)
    rows = []
    for i, (count, start) in enumerate(sizes):
        size = -(-(start + count) // runner.block_size)
        tables = range(runner.window.num_tables)
        owned = tuple([blocks.pop() for _ in range(size)] for _ in tables)
        token_ids = [rng.randrange(1009) for _ in range(count)]
        samples = i < num_decodes or rng.random() < 0.5
        rows.append(Row(i, i, token_ids, start, owned, samples, GREEDY, 0, 1))
    return Batch(tuple(rows), num_decodes)


@contextmanager
def computing_all() -> Iterator[None]:
    """The last layer's output of all tokens, of which the head then takes its rows."""

    def of_all(self: AttentionInputs, *_: Any) -> AttentionInputs:
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionInputs, "of_last_layer", of_all)
        patch.setattr(StreamingInputs, "of_last_layer", of_all)
        yield


@torch.inference_mode()
def step(runner: ModelRunner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the cache as the step left it."""
    generator = torch.Generator().manual_seed(3)
    if runner._cache.is_floating_point():
        runner._cache.copy_(torch.randn(runner._cache.shape, generator=generator))
    else:
        runner._cache.zero_()  # bytes of any kind would be scales of any kind
    return runner.logits(batch), runner._cache.clone()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_decodes", "sizes"), STEPS, ids=str)
def test_it_gives_what_computing_all_gives(
    runner: ModelRunner, num_decodes: int, sizes: list[tuple[int, int]], seed: int
) -> None:
    batch = make_batch(runner, random.Random(seed), num_decodes, sizes)
    logits, cache = step(runner, batch)
    with computing_all():
        expected, expected_cache = step(runner, batch)
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
    batch = make_batch(runner, random.Random(1), *STEPS[-1])
    exact = runner._builder.layout.shape_of(batch)
    found = runner._graphs and runner._graphs.find(exact)
    shape = found[0] if found else exact
    assert shape.num_samples < shape.num_tokens
    runner.logits(batch)
    assert len(seen) == len(runner._model.blocks)
    assert seen[:-1] == [shape.num_tokens] * (len(seen) - 1)
    assert seen[-1] == shape.num_samples
