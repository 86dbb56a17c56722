"""All blocks in one call of the processor's kernels: what the layers compute one by one."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fixtures.kernels.instruction_sets import HERE, within
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.parity import GRID, check_against
from slipstream.kernels.attention.scores import Scores
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cpu.native import library
from slipstream.kernels.experts.route import Routed
from slipstream.layers.decoder import Block
from slipstream.layers.experts import Started
from slipstream.runner.model_runner import ModelRunner
from torch import Tensor
from transformers import AutoModelForCausalLM

if library() is None:
    pytest.skip("this machine has no C++ compiler or no AVX2", allow_module_level=True)

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def generate(runner: ModelRunner) -> list[list[int]]:
    """Greedy tokens of prompts that come in chunks beside decodes."""
    generations = [Generation(prompt, 8) for prompt in random_prompts([37, 1, 90])]
    Driver(runner).finish(generations, chunk=37)
    return [generation.outputs for generation in generations]


def one_by_one(runner: ModelRunner) -> None:
    """Leave blocks to their layers."""
    runner._model.whole = None


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(("cache", "weights"), [("auto", "int4"), ("int8", "auto")])
def test_blocks_in_one_are_those_one_by_one(
    cache: str, weights: str, deterministic: bool, tmp_path: Path
) -> None:
    """Blocks by another instruction set have the same last bit, too."""
    directory = save(make_model("qwen3", **SIZES), tmp_path)
    settings = {"quantization": weights, "kv_cache_dtype": cache, "deterministic": deterministic}
    settings |= {"block_size": 16}
    whole, parts = (make_runner(directory, **settings) for _ in range(2))
    assert whole._model.whole is not None
    one_by_one(parts)
    with patch.object(Block, "__call__", side_effect=AssertionError("one by one")):
        outputs = generate(whole)
    with within(HERE[0]):
        assert outputs == generate(parts)
    assert torch.equal(kv_format.read(whole._cache), kv_format.read(parts._cache))


def check_blocks_in_one(runner: ModelRunner, model: torch.nn.Module) -> None:
    """Compare logits with those of transformers; no block may be computed by itself."""
    generations = [Generation(prompt, 6) for prompt in random_prompts([37, 1, 90])]
    with patch.object(Block, "__call__", side_effect=AssertionError("one by one")):
        Driver(runner, keep_logits=True).finish(generations, chunk=20)
    for generation in generations:
        check_against(model, generation, 1e-4)


@pytest.mark.parametrize("name", ["hunyuan", "ministral 3"])
def test_what_comes_behind_the_rotation(name: str, tmp_path: Path) -> None:
    """Norms, and factors by position, which blocks in one have as transformers does."""
    family, own = GRID[name]
    model = make_model(family, **(own | SIZES))
    runner = make_runner(save(model, tmp_path))
    assert runner._model.whole is not None
    check_blocks_in_one(runner, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_multiplied_as_they_are_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    """In blocks and head, whose logits are those of transformers in fp32."""
    model = make_model("llama", **SIZES, tie_word_embeddings=False).to(dtype)
    runner = make_runner(save(model, tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    decoder = runner._model
    assert decoder.whole is not None
    kept = [decoder.blocks[0].attention.qkv, decoder.blocks[1].mlp.down, decoder.head.product]
    assert {place.linear.weights.values.dtype for place in kept} == {dtype}
    generations = [Generation(prompt, 4) for prompt in random_prompts([37, 1, 150])]
    with patch.object(Block, "__call__", side_effect=AssertionError("one by one")):
        Driver(runner, keep_logits=True).finish(generations, chunk=140)
    for generation in generations:
        with torch.no_grad():
            truth = model(torch.tensor([generation.tokens])).logits[0]
        for i, logits in enumerate(generation.logits):
            want = truth[len(generation.prompt) - 1 + i]
            assert (logits - want).abs().max() <= 1e-4 * want.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("gpt_oss", {"num_hidden_layers": 3}),
    ],
    ids=["mixtral", "qwen3 moe", "normalised", "gpt-oss"],
)
def test_mixtures_of_experts(family: str, own: dict[str, object], tmp_path: Path) -> None:
    """Logits are those of transformers; steps with terms of adapters are apart."""
    model = make_model(family, **SIZES, moe_intermediate_size=48, **own)
    whole = make_runner(save(model, tmp_path))
    assert whole._model.whole is not None
    check_blocks_in_one(whole, model)

    class Terms:
        in_step = True

        def start(self, x: Tensor, routed: Routed) -> Started:
            return Started()

        def finish(
            self, x: Tensor, inner: Tensor, routed: Routed, products: Tensor, started: Started
        ) -> None:
            products.zero_()

    other = make_runner(tmp_path)
    one_by_one(other)
    for runner in (whole, other):
        runner._model.blocks[1].mlp.adapt = Terms()
    assert generate(whole) == generate(other)


def test_mixtures_that_need_more_are_left_to_their_layers(tmp_path: Path) -> None:
    """An expert of all rows, sizes that are no tiles, rows that may not depend on each other."""
    sizes = SIZES | {"moe_intermediate_size": 48}
    shared = save(make_model("qwen2_moe", **sizes), tmp_path / "shared")
    assert make_runner(shared)._model.whole is None
    odd = save(make_model("qwen3_moe", **sizes | {"moe_intermediate_size": 40}), tmp_path / "odd")
    assert make_runner(odd)._model.whole is None
    even = save(make_model("qwen3_moe", **sizes), tmp_path / "even")
    assert make_runner(even)._model.whole is not None
    assert make_runner(even, deterministic=True)._model.whole is None


def test_a_sum_over_ranks_is_not_left_out(tmp_path: Path) -> None:
    directory = save(make_model("llama", **SIZES), tmp_path)
    plain, staged, apart = (make_runner(directory, quantization="int8") for _ in range(3))
    one_by_one(apart)

    class Doubled:
        def add_sum(self, values: Tensor, x: Tensor) -> None:
            values += x + x

    for runner in (staged, apart):
        runner._model.blocks[1].mlp.down.linear.ranks = Doubled()
    assert generate(staged) == generate(apart) != generate(plain)


def test_a_block_in_the_place_of_another_is_run(tmp_path: Path) -> None:
    directory = save(make_model("llama", **SIZES), tmp_path)
    plain, changed = (make_runner(directory, quantization="int8") for _ in range(2))
    model = changed._model
    model.blocks = [model.blocks[0], model.blocks[0], *model.blocks[2:]]
    assert generate(changed) != generate(plain)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_families_that_need_more_are_left_to_their_layers(family: str, tmp_path: Path) -> None:
    runner = make_runner(save(make_model(family), tmp_path), quantization="int8")
    assert runner._model.whole is None


@pytest.mark.parametrize(
    "changed", [Scores(cap=5.0), Scores(slopes=torch.ones(4))], ids=["cap", "slopes"]
)
def test_changed_scores_are_left_to_the_layers(changed: Scores, tmp_path: Path) -> None:
    directory = save(make_model("llama", **SIZES), tmp_path)
    assert make_runner(directory, quantization="int8")._model.whole is not None
    with patch("slipstream.models.decoder.Scores", lambda *_: changed):
        assert make_runner(directory, quantization="int8")._model.whole is None
