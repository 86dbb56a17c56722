"""Windows, and sinks against the paper's method step by step: through engine and cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.checkpoints import (
    Asker,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.streaming import CASES, reference
from fixtures.tiers import quick_of
from slipstream.core.batch import Batch
from slipstream.engine.scheduler import Limits
from slipstream.kernels.elementwise.rope import rotate
from slipstream.layers.dims import RopeConfig
from slipstream.layers.rope import cos_sin_at, frequencies
from slipstream_contract.sampling import SamplingParams


class Listener:
    """A runner that keeps the logits of every step, by sequence and by the token's number."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.batches: list[Batch] = []
        self.most_held = 0  # blocks of a sequence that it still sees

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Any:
        logits = self._runner.logits(batch)
        samplers = [row for row in batch.rows if row.samples]
        for row, values in zip(samplers, logits, strict=True):
            self.logits[row.sequence_id, row.num_outputs] = values
        self.batches.append(batch)
        for row in batch.rows:
            num_outside = 0 if row.gap else len(self.window.outside(row.start, self.block_size))
            self.most_held = max(self.most_held, len(row.tables[-1]) - num_outside)
        return self._runner.launch(batch)


@pytest.mark.parametrize("name", quick_of(CASES, ["llama3"]))
def test_step_by_step(name: str, tmp_path: Path) -> None:
    family, overrides, window, num_sinks = CASES[name]
    model = make_model(family, max_position_embeddings=64, **overrides)
    runner = make_runner(
        save(model, tmp_path),
        attention_window=window,
        sink_tokens=num_sinks,
        max_num_batched_tokens=19,
        max_num_seqs=4,
        kv_cache_tokens=8 * 16,
    )
    listener = Listener(runner)
    asker = Asker(listener, Limits(4, 19))
    prompts = random_prompts([150, 1, 7, 90])  # far beyond window and context
    num_outputs = [60, 150, 40, 30]
    for prompt, count in zip(prompts, num_outputs, strict=True):
        asker.submit(prompt, SamplingParams(max_tokens=count, temperature=0.0))
    for _ in range(30):
        asker.step()
    scheduler = asker.engine._scheduler
    scheduler._running.preempt(
        next(iter(scheduler.running.values()))
    )  # long after it began to forget
    asker.drain()
    assert listener.most_held <= runner.window.max_local_blocks(8)
    for number, prompt in enumerate(prompts):
        outputs = asker.answers[number, 0].token_ids
        assert len(outputs) == num_outputs[number]
        exact = reference(model, prompt + outputs, window, num_sinks)[len(prompt) - 1 :]
        for i, token in enumerate(outputs):
            assert (listener.logits[number, i] - exact[i]).abs().max() <= 1e-4
            assert token == int(exact[i].argmax())


def test_rotation_far_from_the_beginning() -> None:
    """Distances are as exact after two million tokens as at first."""
    wide = frequencies(RopeConfig(), 64)
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(position: int, distance: int) -> float:
        tables = cos_sin_at(wide, torch.tensor([position, position - distance]))
        rotated = [
            rotate(x, *row[None, None].chunk(2, dim=-1))
            for x, row in zip((q, k), tables, strict=True)
        ]
        return float((rotated[0] * rotated[1]).sum())

    for distance in (0, 1, 7, 500):
        assert abs(score(2_000_123, distance) - score(600, distance)) < 1e-4


SLIDING = {"sliding_window": 20, "max_position_embeddings": 512}


@pytest.mark.parametrize("is_reused", [True, False])
def test_a_window_of_the_model_through_the_engine(is_reused: bool, tmp_path: Path) -> None:
    """Greedy tokens as transformers', of prompts far longer than the window; few blocks."""
    model = make_model("mistral", **SLIDING)
    runner = make_runner(
        save(model, tmp_path), max_num_batched_tokens=19, max_num_seqs=4, kv_cache_tokens=8 * 20
    )
    most = runner.window.max_local_blocks(8)
    assert most == 6
    listener = Listener(runner)
    asker = Asker(listener, Limits(4, 19, kv_cache_reuse=is_reused))
    (long, other), asked = random_prompts([200, 90]), []

    def ask(prompt: list[int], count: int, n: int = 1) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, n=n)
        asked.extend((asker.submit(prompt, sampling), i, prompt) for i in range(n))

    ask(long, 100)
    ask(other, 20, n=3)
    ask(long[:3], 60)
    for _ in range(25):
        asker.step()
    scheduler = asker.engine._scheduler
    scheduler._running.preempt(next(iter(scheduler.running.values())))
    asker.drain()
    ask(long + asker.answers[0, 0].token_ids + [5, 6], 30)  # the next turn
    ask([*other, 7], 10)
    before = sum(len(row.token_ids) for batch in listener.batches for row in batch.rows)
    asker.drain()
    computed = sum(len(row.token_ids) for batch in listener.batches for row in batch.rows) - before
    if is_reused:  # only what the window shows of them must be there
        assert computed < 100
    for number, index, prompt in asked:
        tokens = prompt + asker.answers[number, index].token_ids
        with torch.no_grad():
            exact = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert tokens[len(prompt) :] == exact.tolist()
    assert listener.most_held <= most
