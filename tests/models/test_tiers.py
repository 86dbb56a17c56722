"""A model over a cache in two places: the same tokens and log probs, bit for bit, as without."""

import random
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import make_model, make_runner, save
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

LENGTH, BLOCK = 128, 16  # tokens
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", hidden_size=64, num_hidden_layers=2, max_position_embeddings=LENGTH)
    return save(model, tmp_path_factory.mktemp("tiers") / "Tiny")


def runner_of(
    checkpoint: Path, num_blocks: int, num_slots: int, dtype: str, device: str
) -> ModelRunner:
    settings = {"kv_cache_tokens": num_blocks * BLOCK, "block_size": BLOCK, "kv_cache_dtype": dtype}
    settings |= {"deterministic": True, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    config = EngineConfig(checkpoint=str(checkpoint), device="cpu", dtype="float32", **settings)
    num_bytes = num_slots * resolve(config).block_bytes
    return make_runner(checkpoint, device=device, kv_cache_host_bytes=num_bytes, **settings)


class Talk:
    """Requests, all of which end; blocks that hold nothing hold NaN (on a GPU padding reads it)."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.engine = Engine(Limits(4, 48, 1000), runner, None)
        self.answers: dict[int, Answer] = {}

    def ask(self, number: int, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.7, seed=number, log_probs=True
        )
        self.answers[number] = ([], [])
        self.engine.submit(b"test", Submit(number, pack(prompt), sampling, 1))

    @torch.inference_mode()
    def step(self) -> None:
        empty = self.engine._scheduler.cache._blocks._empty
        is_cpu = self.runner._caches[0].is_cpu
        for cache in (
            self.runner._caches if is_cpu else ()
        ):  # all ones: NaN in every format, as scales if not else
            cache.view(torch.uint8)[empty] = 255
        for tokens in self.engine.step().get(b"test", ()):
            self.answers[tokens.request][0].extend(tokens.token_ids)
            self.answers[tokens.request][1].extend(tokens.log_probs)
        self.engine.check_integrity()

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()


def talk(
    checkpoint: Path, seed: int, dtype: str = "auto", device: str = "cpu", num_turns: int = 24
) -> int:
    """Tokens of a tree of turns that came from host memory."""
    rng = random.Random(seed)
    few = Talk(runner_of(checkpoint, 9 + rng.randrange(4), 20, dtype, device))
    asked: dict[int, tuple[list[int], int]] = {}
    turns: list[list[int]] = [[]]
    for number in range(num_turns):
        question = [rng.randrange(100) for _ in range(rng.randrange(3, 20))]
        prompt = (rng.choice(turns) + question)[: LENGTH - 12]
        asked[number] = (prompt, rng.randrange(1, 10))
        few.ask(number, *asked[number])
        for _ in range(rng.randrange(12)):
            few.step()
        if rng.random() < 0.7:
            few.drain()
            turns.append((prompt + few.answers[number][0])[: LENGTH - 30])
    few.drain()
    alone = Talk(runner_of(checkpoint, 40, 0, dtype, device))
    alone.engine._scheduler.cache._reuse._is_on = False
    for number, request in asked.items():
        alone.ask(number, *request)
        alone.drain()
    assert few.answers == alone.answers
    assert alone.engine._scheduler.cache.tier.counts["found_tokens:device"] == 0
    return few.engine._scheduler.cache.tier.counts["found_tokens:host"]


@pytest.mark.parametrize(("dtype", "seed"), [("auto", 1), ("int8", 2)])
def test_a_tree_of_turns(checkpoint: Path, dtype: str, seed: int) -> None:
    assert talk(checkpoint, seed, dtype, num_turns=14) > 0


@pytest.mark.slow
def test_trees_of_turns(checkpoint: Path) -> None:
    for seed in range(12):
        talk(checkpoint, seed, ["auto", "fp8", "int8", "int4"][seed % 4])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", *FORMATS])
def test_trees_of_turns_on_a_gpu(checkpoint: Path, dtype: str) -> None:
    assert sum(talk(checkpoint, seed, dtype, device="cuda") for seed in range(6)) > 0
