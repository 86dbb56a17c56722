"""An adapter that a client sends, beside the plain reading of it, a row after another."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.models.adapters import SIZES
from fixtures.models.checkpoints import make_model, save
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slipstream.errors import CheckpointError
from slipstream.models.adapters import legacy
from slipstream.models.adapters.legacy import MODULES, read_task
from slipstream.models.adapters.read import AdapterWeights
from slipstream.models.adapters.targets import Part, Targets
from slipstream_contract.lora import LoraTask
from slipstream_convert.adapters import targets_of

FULL, HALF = torch.float32, torch.float16
WIDTH = 600
FAULTS = ("", "", "", "", "module", "layer", "rank", "behind", "infinite", "again", "-0 behind")
Case = tuple[int, int, int, str]  # module, layer, rank, fault


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return targets_of(save(make_model("llama", **SIZES), tmp_path_factory.mktemp("base")))


def parts_of(case: Case, targets: Targets) -> list[Part]:
    parts = [targets.of_decoder(case[1], name) for name in MODULES[case[0]]]
    return [part for part in parts if part is not None]


def end_of(case: Case, targets: Targets) -> int:
    parts = parts_of(case, targets)
    return case[2] * (parts[0].inputs + sum(part.outputs for part in parts))


def task_of(cases: list[Case], targets: Targets) -> tuple[LoraTask, str]:
    """Rows of numbers, and what the first of the faults is called, in the order of the rows."""
    rng = np.random.default_rng(len(cases))
    weights, config = np.zeros((len(cases), WIDTH), np.float16), []
    seen: set[str] = set()
    found = ""
    for number, (module, layer, rank, fault) in enumerate(cases):
        end = end_of((module, layer, rank, ""), targets)
        numbers = rng.normal(size=end).astype(np.float16)
        why = {
            "module": "modules are 0, 1",
            "layer": "the model has no such matrix",
            "rank": "ranks are from 1 to 512",
            "behind": f"has numbers behind the {end} of A and B",
        }.get(fault, "")
        if end > WIDTH:
            why = why if fault in ("module", "layer", "rank") else f"A and B have {end} numbers"
        places = {part.name for part in parts_of((module, layer, rank, ""), targets)}
        why = why or ("a row before it has that module" if places & seen else "")
        seen |= places
        weights[number, : len(numbers)] = numbers[:WIDTH]
        if end < WIDTH:
            weights[number, end] = {"behind": np.nan, "-0 behind": -0.0}.get(fault, 0.0)
        elif fault == "behind" and end == WIDTH:
            why = why if "before" in why else ""
        if fault == "infinite":
            weights[number, 1] = np.inf
        config.append(
            (
                9 if fault == "module" else module,
                5 if fault == "layer" else layer,
                513 if fault == "rank" else rank,
            )
        )
        found = found or (why and rf"\[{number}\] is .*{why}")
    if not found and any(case[3] == "infinite" for case in cases):
        found = "lora_weights: model.* A, times the scaling, holds NaN, infinity"
    config = np.array(config, np.int32)
    return LoraTask(1, *weights.shape, weights.tobytes(), config.tobytes()), found


def plain(task: LoraTask, targets: Targets, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """B A of each matrix, by the decoder's names, of a task without faults."""
    found = {}
    weights = np.frombuffer(task.weights, np.float16).reshape(-1, WIDTH)
    config = np.frombuffer(task.config, np.int32).reshape(-1, 3)
    for numbers, (module, layer, rank) in zip(weights, config.tolist(), strict=True):
        parts = parts_of((module, layer, rank, ""), targets)
        flat, middle = torch.from_numpy(numbers.copy()).to(dtype), rank * parts[0].inputs
        for part in parts:
            end = middle + rank * part.outputs
            sides = flat[: rank * part.inputs].view(rank, -1), flat[middle:end].view(-1, rank)
            found[part.name] = torch.cat([side.flatten() for side in sides])
            middle = end
    return found


def sides(read: AdapterWeights, targets: Targets) -> dict[str, torch.Tensor]:
    """What `plain` finds, of what was read."""
    found = {}
    for part in targets.all():
        for term in read.terms.get(part.place, ()):
            begin = part.first - term.first
            if 0 <= begin < len(term.b):
                assert term.a is not None
                own = term.b[begin : begin + part.outputs]
                found[part.name] = torch.cat([term.a.flatten(), own.flatten()])
    return found


modules = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 0])
one = st.tuples(modules, st.integers(0, 1), st.integers(1, 9), st.sampled_from(FAULTS))


@settings(deadline=None)
@given(
    cases=st.lists(one, min_size=1, max_size=12),
    piece=st.sampled_from([1, 3000, 1 << 20]),
    dtype=st.sampled_from([FULL, torch.bfloat16, HALF]),
)
@example(cases=[(1, 0, 2, ""), (3, 1, 2, "behind"), (1, 1, 1, "rank")], piece=1, dtype=HALF)
@example(cases=[(0, 0, 2, "-0 behind"), (5, 0, 2, ""), (7, 0, 2, "")], piece=3000, dtype=FULL)
@example(cases=[(4, 0, 1, "infinite"), (4, 1, 1, "layer")], piece=1, dtype=FULL)
@example(cases=[(4, 0, 1, "infinite"), (4, 1, 1, "")], piece=1, dtype=FULL)
@example(cases=[(0, 0, 2, ""), (3, 0, 2, ""), (4, 1, 1, "rank")], piece=1 << 20, dtype=FULL)
def test_rows_are_read_as_they_are_one_by_one(
    cases: list[Case], piece: int, dtype: torch.dtype, targets: Targets
) -> None:
    task, why = task_of(cases, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(legacy, "_PIECE", piece)
        if why:
            with pytest.raises(CheckpointError, match=why):
                read_task(task, targets, dtype)
            return
        read = read_task(task, targets, dtype)
    expected, found = plain(task, targets, dtype), sides(read, targets)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert read.rank == max(rank for _, _, rank, _ in cases)


def test_digests_do_not_depend_on_the_order_of_rows(targets: Targets, tmp_path: Path) -> None:
    cases = [(1, 0, 2, ""), (4, 1, 2, ""), (6, 0, 1, "")]
    task, _ = task_of(cases, targets)
    weights = np.frombuffer(task.weights, np.float16).reshape(3, WIDTH)
    config = np.frombuffer(task.config, np.int32).reshape(3, 3)

    def digest(weights: np.ndarray, config: np.ndarray) -> bytes:
        arrays = (weights.tobytes(), config.tobytes())
        return read_task(LoraTask(1, *weights.shape, *arrays), targets, torch.float32).digest

    same = digest(weights, config)
    assert digest(weights[::-1], config[::-1]) == same
    assert digest(np.pad(weights, ((0, 0), (0, 9))), config) == same
    others = [np.array(weights) for _ in range(3)]
    for number, other in enumerate(others):
        other[number, 5] += 1
    assert len({same, *(digest(other, config) for other in others)}) == 4
