"""What is run to measure the memory of steps at start, over a real model without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import make_model, make_runner, save
from fixtures.models.repeated import Home, repeat
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.core.laps import Laps
from slipstream.engine.chores import Chores
from slipstream.layers.residual import Residual
from slipstream.runner import model_runner
from slipstream.runner.graphs import Buckets, largest_shapes, layout_of
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.runner.step_inputs import StepInputs
from slipstream.runner.step_shape import StepShape

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", intermediate_size=192, num_hidden_layers=2)
    return save(model, tmp_path_factory.mktemp("measured") / "base")


def measured(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> list[tuple[StepShape, bool]]:
    """Return the shapes of the steps that are measured, and which had tables of adapters."""
    runner = make_runner(checkpoint, **SIZES, **changes)
    runner._staging, runner.adapters._tables.staging = Home(), Home()
    seen: list[tuple[StepShape, bool]] = []
    hidden = runner._hidden

    def noted(shape: StepShape, inputs: StepInputs, keeps_all: bool = False) -> Residual:
        seen.append((shape, bool(runner.adapters._groups.tables)))
        return hidden(shape, inputs, keeps_all)

    compiled: set[tuple[StepShape, bool]] = set()

    def left(
        device: torch.device, largest: Callable[[], object], others: list[Callable[[], object]]
    ) -> int:
        compiled.update(seen)
        seen.clear()
        for step in (*others, largest):
            step()
        return 0

    monkeypatch.setattr(runner, "_hidden", noted)
    monkeypatch.setattr(runner, "_make_caches", lambda plan, count: None)
    monkeypatch.setattr(model_runner, "left_on_gpu", left)
    monkeypatch.setattr(model_runner.jit, "compile_ahead", nullcontext)
    settings = {"checkpoint": str(checkpoint), "device": "cpu", "dtype": "float32"}
    plan = resolve(EngineConfig(**settings, **SIZES, **changes))
    layout = layout_of(plan)
    buckets = Buckets(plan.max_num_seqs, plan.max_num_batched_tokens, layout)
    with torch.inference_mode():
        ModelRunner._measure(runner, replace(plan, device=torch.device("cuda")), buckets, Laps())
    largest = max(buckets.shapes, key=lambda shape: shape.num_tokens)
    assert {shape for shape, _ in seen} == {*largest_shapes(plan, layout), largest}
    kinds = {has for _, has in seen}  # kernels of steps that may come are compiled at start
    assert compiled >= {(shape, has) for shape in buckets.shapes for has in kinds}
    return seen


def test_steps_are_measured_with_the_adapters_that_may_come(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = measured(checkpoint, monkeypatch, adapter_memory=1 << 20)
    assert {shape for shape, has in seen if has} == {shape for shape, has in seen if not has}


def test_steps_that_keep_what_blocks_allocate_are_measured(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 40 not in {shape.num_tokens for shape, _ in measured(checkpoint, monkeypatch)}
    monkeypatch.setattr("slipstream.fuse.repeat.MOST_TOKENS", 40)
    assert 40 in {shape.num_tokens for shape, _ in measured(checkpoint, monkeypatch)}


def test_such_steps_are_measured_where_there_are_more_sequences_than_tokens_of_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.fuse.repeat.MOST_TOKENS", 3)
    found = {shape for shape, _ in measured(checkpoint, monkeypatch)}
    assert StepShape(3, 3, 2, 3, 1, contexts=((1, 1),)) in found


@pytest.mark.parametrize("memory", quick_of([0, None], [None]))
def test_where_no_adapter_is_expected_none_is_measured(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, memory: int | None
) -> None:
    seen = measured(checkpoint, monkeypatch, adapter_memory=memory)
    assert not any(has for _, has in seen)


@pytest.mark.parametrize(
    ("memory", "num_beside"),
    [(0, 99), pytest.param(1 << 20, 99, marks=pytest.mark.rest), (1 << 20, 2)],
)
def test_an_idle_engine_captures_the_graphs_of_adapters_that_are_expected(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, memory: int, num_beside: int
) -> None:
    """As many as there is memory for beside what is planned for adapters."""
    runner = make_runner(checkpoint, **SIZES, adapter_memory=memory)
    pool = runner.adapters.num_free_bytes
    assert 0 <= memory - pool < runner.adapters.page_bytes

    def free(device: torch.device) -> int:  # each graph takes a byte
        return pool + num_beside - 1 - len(runner._graphs._adapted if runner._graphs else ())

    monkeypatch.setattr(model_runner, "free_on_gpu", free)
    settings = {"checkpoint": str(checkpoint), "device": "cpu", "dtype": "float32"}
    plan = resolve(EngineConfig(**settings, **SIZES))
    (repeats,) = repeat([runner], plan, monkeypatch)
    assert runner._graphs is not None
    repeats.notes.clear()
    pieces = list(runner.chores(plan))
    ran = [note[0] for note in repeats.notes if note[0] != "capture" and note[1]]  # type: ignore[index]
    shapes = runner._graphs._buckets.shapes[:num_beside] if memory else []
    assert ran == shapes
    assert pieces == [None] * len(shapes)
    assert list(runner.captured_ahead()) == []
    assert runner._graphs._adapted.keys() == set(shapes)


def test_chores_that_end_early_keep_what_tuning_has_found(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, kept = make_runner(checkpoint, **SIZES), []

    def tuning(*given: object) -> Iterator[None]:
        try:
            yield None
            yield None
        finally:
            kept.append("found")

    monkeypatch.setattr(model_runner.idle_tuning, "chores", tuning)
    settings = {"checkpoint": str(checkpoint), "device": "cpu", "dtype": "float32"}
    chores = Chores(runner.chores(resolve(EngineConfig(**settings, **SIZES))), lambda: 1 << 62)
    chores._starts_ns = 0
    chores.run()
    assert kept == []
    chores.close()
    assert kept == ["found"]
