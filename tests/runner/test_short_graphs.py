"""A shape whose graph memory is too short for runs eagerly; when the collector runs."""

import gc
from collections.abc import Callable

import pytest
import torch
from fixtures.tiers import quick_of
from slipstream.runner.graphs import Buckets, Captured, Graphs
from slipstream.runner.step_shape import StepShape

OF_TORCH = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
OF_CUDA = torch.AcceleratorError("CUDA error: out of memory", 2)
OTHER = torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


@pytest.mark.parametrize("has_sums", quick_of([False, True], [True]), ids=["alone", "sums"])
@pytest.mark.parametrize(
    "error", quick_of([OF_TORCH, OF_CUDA, OTHER], [OF_CUDA, OTHER]), ids=["torch", "cuda", "other"]
)
@pytest.mark.parametrize("fails", ["run", "capture"])
def test_a_shape_that_is_short_of_memory_has_no_graph(
    fails: str, error: RuntimeError, has_sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait in the sums of a first run: a rank that is short of memory there fails."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    asked: list[bool] = []

    def all_can(can: bool) -> bool:
        asked.append(can)
        return can

    def step(number: int) -> torch.Tensor:
        if fails == "run" and number == 2:
            raise error
        return torch.zeros(number)

    def capture(run: Callable[[], torch.Tensor], mode: str) -> Captured:
        logits = run()
        if fails == "capture" and len(logits) == 2:
            raise error
        return Captured(object(), logits)  # type: ignore[arg-type]

    graphs = Graphs(Buckets(4, 1), all_can, capture, has_sums)
    shapes = graphs._buckets.shapes
    short = [shape for shape in shapes if shape.num_rows == 2]
    assert 0 < len(short) < len(shapes)

    def prepare(shape: StepShape) -> Callable[[], torch.Tensor]:
        return lambda: step(shape.num_rows)

    if error is OTHER or (fails == "run" and has_sums):
        with pytest.raises(type(error), match=str(error)):
            graphs.capture(prepare)
        return
    graphs.capture(prepare)
    assert len(asked) == len(shapes)
    assert [shape for shape in shapes if graphs.graph(shape) is None] == short


def test_a_run_of_captures_collects_garbage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is collected while one captures, nor before the graph of a step that waits for it."""
    collected: list[int] = []
    were_enabled: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(were_enabled)))

    def capture(run: Callable[[], torch.Tensor], mode: str) -> Captured:
        were_enabled.append(gc.isenabled())
        return Captured(object(), run())  # type: ignore[arg-type]

    def prepare(shape: StepShape, has_experts: bool) -> Callable[[], torch.Tensor]:
        return lambda: torch.zeros(shape.num_rows)

    graphs = Graphs(Buckets(8, 1), capture=capture)
    first, *others = graphs._buckets.shapes
    assert len(others) > 2
    graphs.graph(first, prepare)
    assert not collected, "before the graph of a step"
    for _ in graphs.captured_ahead(prepare):
        pass
    assert collected == [1]
    assert were_enabled == [False] * (1 + len(others))
    assert gc.isenabled()
    assert list(graphs.captured_ahead(prepare)) == []
    assert len(collected) == 1, "nothing was left to capture"
