"""Layers that see a window, or their chunk, beside layers that see everything: each kind holds what
it needs.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.checkpoints import Asker, make_model, make_runner, random_prompts, save
from fixtures.tiers import quick_of
from slipstream.core.batch import Batch
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams

WINDOW, CHUNK, BLOCK = 20, 24, 8
LOCAL, FULL = "sliding_attention", "full_attention"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 307}
GEMMA = {
    **SIZES,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": [LOCAL, LOCAL, FULL, LOCAL],
    "max_position_embeddings": 1024,
}
LLAMA4 = {
    **SIZES,
    "num_hidden_layers": 4,
    "attention_chunk_size": CHUNK,
    "no_rope_layers": [1, 1, 0, 1],
    "max_position_embeddings": 1024,
    "intermediate_size_mlp": 64,
    "num_local_experts": 3,
    "interleave_moe_layer_step": 2,
    "floor_scale": 90,
}
FAMILIES = {"gemma3": GEMMA, "llama4": LLAMA4}


class Watched:
    """A runner whose empty blocks are NaN, and that notes what each sequence holds."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.asker: Asker | None = None
        self.held: list[list[int]] = []  # blocks by table, of the first row of every step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Any:
        assert self.asker is not None
        scheduler = self.asker.engine._scheduler
        with torch.inference_mode():
            for cache in self._runner._caches:
                cache[scheduler.cache._blocks._empty] = torch.nan
        sequence = scheduler.running[batch.rows[0].sequence_id]
        self.held.append(list(map(len, scheduler.cache._live_blocks(sequence.cache))))
        return self._runner.launch(batch)


def asker_of(runner: ModelRunner, limits: Limits) -> tuple[Asker, Watched]:
    watched = Watched(runner)
    watched.asker = asker = Asker(watched, limits)
    return asker, watched


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make_model(request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def checkpoint(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("groups"))


def greedy(model: torch.nn.Module, prompt: list[int], outputs: list[int]) -> list[int]:
    """What transformers would have said at every place."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + outputs])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_local_blocks_stay_constant_while_the_others_grow(
    model: torch.nn.Module, checkpoint: Path
) -> None:
    """In a cache that would not hold a third of the sequence, were every layer to keep all."""
    runner = make_runner(checkpoint, max_num_batched_tokens=24, kv_cache_tokens=8 * 27)
    asker, watched = asker_of(runner, Limits(4, 24))
    (prompt,) = random_prompts([400], 307)
    asker.submit(prompt, SamplingParams(max_tokens=250, temperature=0.0))
    asker.drain()
    outputs = asker.answers[0, 0].token_ids
    assert len(outputs) == 250
    assert outputs == greedy(model, prompt, outputs)
    assert runner.num_blocks == 4 * 27
    full = [held[0] for held in watched.held]
    local = [held[1:] for held in watched.held]
    assert max(full) == -(-(400 + 249) // BLOCK)
    assert all(max(held) <= runner.window.max_local_blocks(BLOCK) for held in local)
    decodes = local[-240:]
    assert max(map(max, decodes)) <= -(-(runner.window.size - 1) // BLOCK) + 1
    with pytest.raises(ContractError, match=r"it needs 113 blocks, the KV cache has 108 \(216 tok"):
        asker.submit(prompt * 2, SamplingParams(max_tokens=1))


@dataclass
class Way:
    """How a crowd is served."""

    max_tokens: int  # of a step
    num_blocks: int = 600
    is_reused: bool = True
    host_bytes: int = 0
    has_trouble: bool = False  # cancels and preemptions


ROOMY, TIGHT = 600, 120
WAYS = {
    "reuse": Way(24),
    "little room": Way(48, TIGHT),
    "host memory": Way(48, TIGHT, host_bytes=1 << 20),
    "trouble": Way(31, has_trouble=True),
    "trouble, little room, host memory": Way(31, TIGHT, True, 1 << 20, True),
    "trouble without reuse": Way(31, TIGHT, False, 0, True),
}


class Talk:
    """Turns of a few conversations that have a beginning in common."""

    def __init__(self, checkpoint: Path, way: Way, **options: object) -> None:
        runner = make_runner(
            checkpoint,
            deterministic=True,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            kv_cache_tokens=way.num_blocks // 4 * BLOCK,
            kv_cache_host_bytes=way.host_bytes,
            **options,
        )
        limits = Limits(4, way.max_tokens, kv_cache_reuse=way.is_reused)
        self.asker, _ = asker_of(runner, limits)
        self.asker.engine._scheduler.cache.tier._compute_s = lambda: None  # copies always pay
        self.way = way
        self.rng = random.Random(7)
        base = random_prompts([70], 307)[0]
        self.histories = [
            [*base[: 70 - 9 * i], *random_prompts([i + 2], 307, i)[0]] for i in range(4)
        ]
        self.told: list[tuple[list[int], SamplingParams, list[int], list[float]]] = []

    def turn(self, number: int) -> None:
        asker, asked = self.asker, []
        for i, history in enumerate(self.histories):
            sampling = SamplingParams(
                max_tokens=20 + 3 * i,
                temperature=float(i == 2),
                seed=number,
                log_probs=True,
                n=1 + i % 2,
            )
            asked.append((asker.submit(history, sampling), sampling))
        if self.way.has_trouble:
            self.make_trouble()
        asker.drain()
        for i, (request, sampling) in enumerate(asked):
            for j in range(sampling.n):
                answer = asker.answers[request, j]
                about = (self.histories[i], sampling)
                self.told.append((*about, answer.token_ids, answer.log_probs))
            question = random_prompts([3], 307, 10 * number + i)[0]
            answered = asker.answers[request, 0].token_ids
            self.histories[i] = [*self.histories[i], *answered, *question]

    def make_trouble(self) -> None:
        gone = self.asker.submit([*self.histories[0], 5], SamplingParams(max_tokens=40))
        scheduler = self.asker.engine._scheduler
        for step in range(40):
            self.asker.step()
            self.asker.engine.check_integrity()
            running = [s for s in scheduler.running.values() if s.num_preemptions < 3]
            if step % 7 == 6 and running:
                scheduler._running.preempt(self.rng.choice(running))
            if step == 12:
                self.asker.engine.cancel(b"asker", gone)


def talk(checkpoint: Path, way: Way, **options: object) -> Talk:
    talk = Talk(checkpoint, way, **options)
    for number in range(3):
        talk.turn(number)
    return talk


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> Talk:
    return talk(checkpoint, Way(48, is_reused=False))


def test_greedy_tokens_beyond_the_window(model: torch.nn.Module, wanted: Talk) -> None:
    for prompt, sampling, outputs, _ in wanted.told:
        assert len(outputs) == sampling.max_tokens
        if not sampling.temperature:
            assert outputs == greedy(model, prompt, outputs)


@pytest.mark.parametrize("name", quick_of(WAYS, {"trouble, little room, host memory"}))
def test_the_same_bits_whatever_happens(name: str, checkpoint: Path, wanted: Talk) -> None:
    way = WAYS[name]
    other = talk(checkpoint, way)
    assert other.told == wanted.told
    counters = other.asker.engine.figures().counters
    if way.is_reused:
        assert counters["prefix_hits"] > 0.3 * counters["prefix_queries"]
    if way.host_bytes:
        assert counters["found_tokens:host"] > 0
    if way.num_blocks == TIGHT and way.is_reused:
        assert counters["evicted_blocks:usual"] + counters["moved_blocks:out"] > 0
    if way.has_trouble:
        assert other.asker.engine.status().num_preemptions > 0
