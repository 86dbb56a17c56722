"""Endless sequences on a GPU: the CPU's tokens in constant blocks, and errors of their dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.engine.ticks import ticks
from fixtures.models.checkpoints import (
    Answer,
    Asker,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.streaming import CASES, reference
from slipstream.core.batch import Batch
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu
TOLERANCES = {"float32": 1e-4, "float16": 5e-4, "bfloat16": 4e-3}
LENGTHS, NUM_OUTPUTS = [150, 1, 7, 90], [60, 150, 40, 30]


class Watcher:
    """A runner that knows how many blocks its steps took."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.most_held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Any:
        self.most_held = max(self.most_held, *(len(row.tables[0]) for row in batch.rows))
        return self._runner.launch(batch)


def answers(runner: ModelRunner, num_tokens: int = 19, **sampling: Any) -> list[Answer]:
    """Answer prompts far beyond window and context; one is preempted."""
    watcher = Watcher(runner)
    asker = Asker(watcher, Limits(4, num_tokens), ticks())  # bits depend on how prompts are cut
    for prompt, count in zip(random_prompts(LENGTHS), NUM_OUTPUTS, strict=True):
        asker.submit(prompt, SamplingParams(max_tokens=count, log_probs=True, **sampling))
    for _ in range(30):
        asker.step()
    scheduler = asker.engine._scheduler
    scheduler._running.preempt(next(iter(scheduler.running.values())))
    asker.drain()
    assert watcher.most_held <= runner.window.max_local_blocks(runner.block_size)
    return [asker.answers[number, 0] for number in range(4)]


def runner_of(path: Path, name: str, **options: object) -> ModelRunner:
    _, _, window, num_sinks = CASES[name]
    sizes = {"max_num_batched_tokens": 19, "max_num_seqs": 4, "kv_cache_tokens": 8 * 64}
    views = {"attention_window": window, "sink_tokens": num_sinks}
    return make_runner(path, **(sizes | views | options))


def checkpoint(path: Path, name: str) -> tuple[Any, Path]:
    family, overrides, _, _ = CASES[name]
    model = make_model(family, max_position_embeddings=64, **overrides)
    return model, save(model, path)


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_the_cpu_in_fp32(name: str, tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path, name)
    expected = [answer.token_ids for answer in answers(runner_of(path, name), temperature=0.0)]
    for graphs in (True, False):
        runner = runner_of(path, name, device="cuda", cuda_graphs=graphs)
        assert [a.token_ids for a in answers(runner, temperature=0.0)] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_the_naive_one(name: str, dtype: str, tmp_path: Path) -> None:
    """Log probabilities beside the method step by step in the dtype."""
    _, _, window, num_sinks = CASES[name]
    model, path = checkpoint(tmp_path, name)
    ours, truth, naive = [], [], []
    model = model.to(getattr(torch, dtype))
    save(model, path)
    for prompt, answer in zip(
        random_prompts(LENGTHS),
        answers(runner_of(path, name, device="cuda", dtype=dtype), temperature=0.0),
        strict=True,
    ):
        tokens = torch.tensor(answer.token_ids)
        ours += answer.log_probs
        for to, kind in ((truth, torch.float64), (naive, getattr(torch, dtype))):
            logits = reference(model.to(kind), prompt + answer.token_ids, window, num_sinks)
            found = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
            to.append(found[torch.arange(len(tokens)), tokens])
    exact = torch.cat(truth)
    error = (torch.tensor(ours).double() - exact).abs().max()
    naive_error = (torch.cat(naive) - exact).abs().max()
    print(f"{name} {dtype}: {error:.2e}, naive {naive_error:.2e}")
    assert error <= 2 * naive_error + TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_and_chunks_change_no_bit(dtype: str, tmp_path: Path) -> None:
    name = "sinks of more than a block"
    _, path = checkpoint(tmp_path, name)
    options = {"device": "cuda", "dtype": dtype, "deterministic": True}
    runner = runner_of(path, name, **options)
    crowd = answers(runner, temperature=0.7, seed=5)
    again = answers(runner, 11, temperature=0.7, seed=5)
    for one, other in zip(crowd, again, strict=True):
        assert (one.token_ids, one.log_probs) == (other.token_ids, other.log_probs)
    asker = Asker(runner, Limits(1, 19))
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS[3], log_probs=True, temperature=0.7, seed=5)
    asker.submit(random_prompts(LENGTHS)[3], sampling)
    asker.drain()
    alone = asker.answers[0, 0]
    assert (alone.token_ids, alone.log_probs) == (crowd[3].token_ids, crowd[3].log_probs)


def test_the_same_run_again_has_the_same_bits(tmp_path: Path) -> None:
    name = "sinks"
    _, path = checkpoint(tmp_path, name)
    runs = []
    for _ in range(2):
        runner = runner_of(path, name, device="cuda", dtype="bfloat16")
        runs.append([(a.token_ids, a.log_probs) for a in answers(runner, temperature=0.7, seed=3)])
    assert runs[0] == runs[1]
