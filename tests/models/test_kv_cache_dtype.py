"""A cache in fewer bits: the default model through the engine, and what is refused."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Asker,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.kv_cache import row
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
NUM_REQUESTS = 4
by_format = pytest.mark.parametrize("name", FORMATS)


def run(runner: ModelRunner, numbers: list[int], limits: Limits) -> Asker:
    asker = Asker(runner, limits)
    prompts = random_prompts([5 + 2 * i for i in range(NUM_REQUESTS)], 203)
    for i in numbers:
        sampling = SamplingParams(max_tokens=28 + i, seed=i, temperature=0.7, log_probs=True)
        asker.submit(prompts[i], sampling)
    asker.drain()
    return asker


@by_format
def test_neighbours_and_preemptions_change_no_bit(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 203}
    checkpoint = save(make_model("llama", num_hidden_layers=1, **sizes), tmp_path)
    few = {"kv_cache_tokens": 112, "block_size": 16, "deterministic": True}
    runner = make_runner(checkpoint, kv_cache_dtype=name, **few)
    crowd = run(runner, list(range(NUM_REQUESTS)), Limits(NUM_REQUESTS, 40))
    assert crowd.engine.status().num_preemptions > 0
    for i in range(NUM_REQUESTS):
        alone = run(runner, [i], Limits(NUM_REQUESTS, 2048)).answers[0, 0]
        assert alone.token_ids == crowd.answers[i, 0].token_ids
        assert alone.log_probs == crowd.answers[i, 0].log_probs


@by_format
def test_the_default_model(name: str) -> None:
    """Logits are nearly those of an unquantised cache, and the model serves."""
    (prompt,) = random_prompts([50], 4096)
    logits = {}
    for one in ("auto", name):
        runner = make_runner(DEFAULT, kv_cache_dtype=one, block_size=16)
        for start, end in ((0, 20), (20, 49), (49, 50)):  # chunks, and a decode
            batch = Batch((row(prompt[start:end], [3, 1, 2, 0], start),), int(end - start == 1))
            logits[one] = runner.logits(batch)
    error = (logits[name] - logits["auto"]).pow(2).mean().sqrt() / logits["auto"].std()
    assert 0 < float(error) < {"fp8": 0.1, "int8": 0.02, "int4": 0.2}[name]
    asker = Asker(runner, Limits(2, 64))
    asker.submit(prompt, SamplingParams(max_tokens=5, temperature=0.0))
    asker.drain()
    assert len(asker.answers[0, 0].token_ids) == 5


@by_format
def test_nan_is_told_and_stays_in_its_row(name: str, tmp_path: Path) -> None:
    runner = make_runner(
        save(make_model("llama", hidden_size=64), tmp_path), kv_cache_dtype=name, block_size=16
    )
    healthy, sick = random_prompts([12, 12])
    assert sick[3] not in healthy
    expected = runner.run(Batch((row(healthy, [0, 1]),), 0)).token_ids
    with torch.inference_mode():
        runner._model.embedding.table.weight[sick[3]] = float("nan")
    both = runner.run(Batch((row(sick, [4, 5]), row(healthy, [2, 3])), 0))
    assert both.outcomes == [False, True]
    assert both.token_ids[1:] == expected
    again = runner.run(Batch((row(healthy, [4, 5]),), 0))  # where the other's NaN is
    assert again.outcomes == [True]
    assert again.token_ids == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", hidden_size=64), tmp_path_factory.mktemp("kv") / "Tiny")


def config(checkpoint: Path, name: str, **options: object) -> EngineConfig:
    return EngineConfig(checkpoint=str(checkpoint), device="cpu", kv_cache_dtype=name, **options)


def test_the_plan_counts_the_bytes(checkpoint: Path) -> None:
    d = resolve(config(checkpoint, "auto")).model.dims
    num_heads = 32 * 2 * d.num_layers * d.num_kv_heads
    assert resolve(config(checkpoint, "auto")).block_bytes == num_heads * d.head_size * 4
    assert resolve(config(checkpoint, "int8")).block_bytes == num_heads * (d.head_size + 1)
    assert resolve(config(checkpoint, "fp8")).block_bytes == num_heads * (d.head_size + 1)
    plan = resolve(config(checkpoint, "int4"))
    assert plan.block_bytes == num_heads * (d.head_size // 2 + 2)
    assert "KV cache of int4, 320 tokens" in plan.banner(10)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fp4", {}, "kv_cache_dtype = 'fp4' is not one of auto, fp8, int8, int4"),
        ("x" * 99, {}, "kv_cache_dtype = '" + "x" * 64 + "' is not"),
        ("int8", {"block_size": 8}, "kv_cache_dtype = 'int8' needs block_size >= 16, not 8"),
    ],
)
def test_impossible(checkpoint: Path, name: str, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(checkpoint, name, **options))
    assert words in str(caught.value)


def test_heads_that_int4_cannot_hold(checkpoint: Path, tmp_path: Path) -> None:
    odd = save(make_model("llama", hidden_size=64), tmp_path)
    edit_config(odd, head_dim=130)
    with pytest.raises(ConfigError, match=r"head_dim = 130"):
        resolve(config(odd, "int4"))
    assert resolve(config(odd, "int8")).cache_dtype == torch.int8
