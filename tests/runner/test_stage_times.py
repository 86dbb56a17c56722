"""Layers of stages by measured times: what is timed, kept and agreed on. Times are the test's."""

import json
import logging
import random
from pathlib import Path

import msgspec
import pytest
from fixtures.models.checkpoints import make_model, save
from fixtures.models.drawn_later import DRAWN
from fixtures.models.parity import GRID
from fixtures.models.ranks import Group, driven, ranks_of
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.models.stages import kinds_of
from slipstream.runner import host, stage_times
from slipstream.runner.plan import Plan, resolve, settle
from slipstream.runner.stage_times import PartTimes, Timer, bounds_of, measure

# The first of each family; where norms are over the rows of all ranks, a rank is one of two.
NAMES = list({family: name for name, (family, _) in reversed(GRID.items())}.values())


@pytest.fixture(autouse=True)
def small_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host.facts()  # the library is built, and loaded, before others are looked for elsewhere
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stage_times, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(stage_times, "is_busy", lambda count: False)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make_model("llama", num_hidden_layers=6), tmp_path / "checkpoint")


def plan_of(directory: Path, **changes: object) -> Plan:
    settings = {"device": "cpu", "dtype": "float32", "pipeline_parallel": 2} | changes
    return resolve(EngineConfig(checkpoint=str(directory), **settings))


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "slipstream" / "cpu").glob("stages-*.json"))


def fixed(layer_s: float, head_s: float) -> Timer:
    return lambda plan: PartTimes(layer_s, head_s)


def never(plan: Plan) -> PartTimes:
    raise AssertionError("measured again")


def sizes(plan: Plan, timer: Timer) -> list[int]:
    bounds = bounds_of(plan, timer)
    assert bounds is not None
    return [end - begin for begin, end in bounds]


@pytest.mark.parametrize(("head_s", "wanted"), [(0.0, [3, 3]), (2.0, [2, 4]), (40.0, [1, 5])])
def test_a_head_counts_by_its_time(head_s: float, wanted: list[int], llama: Path) -> None:
    assert sizes(plan_of(llama), fixed(1.0, head_s)) == wanted


def test_times_are_measured_once(llama: Path, tmp_path: Path, caplog) -> None:
    plan = plan_of(llama)
    with caplog.at_level(logging.INFO):
        assert sizes(plan, fixed(1.0, 2.0)) == [2, 4]
    (path,) = kept(tmp_path)
    assert (
        "stages: 2 + 4 layers; a layer 1000.000 ms, the head 2000.000 ms, measured: "
        f"kept in {path}" in caplog.text
    )
    assert sizes(plan, never) == [2, 4]
    # Three stages are cut by the same times; two ranks have layers of their own.
    assert sizes(plan_of(llama, pipeline_parallel=3), never) == [1, 2, 3]
    assert sizes(plan_of(llama, tensor_parallel=2), fixed(1.0, 0.0)) == [3, 3]
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        "[]",
        "{}",
        '{"layers": [1, 1], "head": 1}',
        '{"layers": [1, 1, 1, 1, 1, 0], "head": 1}',
        '{"layers": [1, 1, 1, 1, 1, 1], "head": -1}',
        '{"layers": "111111", "head": 1}',
    ],
)
def test_what_cannot_be_read_is_measured_again(wrong: str, llama: Path, tmp_path: Path) -> None:
    sizes(plan_of(llama), fixed(1.0, 2.0))
    (path,) = kept(tmp_path)
    path.write_text(wrong)
    assert sizes(plan_of(llama), fixed(1.0, 0.0)) == [3, 3]
    assert json.loads(path.read_text()) == {"layers": [1.0] * 6, "head": 0.0}


def test_bytes_decide_where_nothing_is_measured_well(llama: Path, monkeypatch, caplog) -> None:
    plan = plan_of(llama)

    def broken(plan: Plan) -> PartTimes:
        raise RuntimeError("planted")

    assert bounds_of(plan, broken) is None
    assert "stages: by bytes, as layers could not be measured: planted" in caplog.text
    monkeypatch.setattr(stage_times, "is_busy", lambda count: True)
    with caplog.at_level(logging.INFO):
        assert bounds_of(plan, never) is None
    assert "stages: by bytes, as others use the machine" in caplog.text
    monkeypatch.setattr(stage_times, "MIN_ELEMENTS", 1 << 24)
    assert bounds_of(plan, never) is None


DENSE = DRAWN["deepseek_v3"](random.Random(1)) | {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
}


def test_layers_that_differ_are_measured_each(tmp_path: Path) -> None:
    directory = save(make_model("deepseek_v3", **DENSE), tmp_path / "checkpoint")
    plan, seen = plan_of(directory), []

    def timer(plan: Plan) -> PartTimes:
        is_dense = bool(plan.model.axes.dense_layers)
        seen.append(is_dense)
        return PartTimes(1.0 if is_dense else 4.0, 1.0)

    assert kinds_of(stage_times._whole(plan).model) == [0, 0, 2, 2]
    assert sizes(plan, timer) == [3, 1]  # the head, 1, 1, 4; 4
    assert seen == [True, False]


@pytest.mark.parametrize("name", quick_of(NAMES, [n for n in NAMES if n.startswith("gqa")]))
def test_a_layer_of_every_family_is_timed(name: str, tmp_path: Path) -> None:
    """Whole, or as one of two ranks has it, by turns."""
    family, changes = GRID[name]
    size = 1 + (NAMES.index(name) % 2 or "olmo" in name)
    directory = save(make_model(family, **changes), tmp_path / "checkpoint")
    plan = plan_of(directory, tensor_parallel=size)
    costs = stage_times.costs_of(plan, stage_times._whole(plan).model, measure)
    assert len(costs.layers) == stage_times._whole(plan).model.dims.num_layers
    assert min(costs.layers) > 0
    assert costs.head > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "int8"},
        {"deterministic": True},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_host_bytes": 1 << 20, "kv_cache_tokens": 4096},
        {"attention_window": 40, "sink_tokens": 4},
        {"speculation": "suffix", "memory_share": 0.5, "load_format": "random"},
    ],
)
def test_what_a_plan_has_is_in_what_is_timed(changes: dict[str, object], llama: Path) -> None:
    times = measure(stage_times._alone(plan_of(llama, **changes), 3))
    assert times.layer > 0
    assert times.head > 0


def test_all_ranks_take_the_layers_of_rank_0(llama: Path, monkeypatch) -> None:
    """Whatever a rank would choose: the times differ with each that is asked for."""
    with ranks_of(llama, 1) as leader:
        wanted = driven(leader, 1009)
    asked: list[int] = []

    def timer(plan: Plan) -> PartTimes:
        asked.append(plan.rank)
        return PartTimes(1.0, 2.0 * len(asked))

    monkeypatch.setattr(stage_times, "measure", timer)
    group = Group(llama, 2, 2)
    assert asked == [0]
    assert resolve(group.config).model.dims.num_layers != 2  # by bytes
    assert group.plan.model.dims.num_layers == 2
    assert len(group.leader._layers) == 2
    found = driven(group.leader, 1009)
    layers = sorted(len(runner._layers) for runner in group.followers)
    group.end()
    assert group.errors == []
    assert [each.outputs for each in found] == [each.outputs for each in wanted]
    assert layers == [2, 4, 4]


def test_the_plan_of_a_rank_has_its_layers(llama: Path) -> None:
    config = msgspec.structs.replace(plan_of(llama).config, tensor_parallel=2)
    bounds = [(0, 1), (1, 6)]
    for rank, layers in enumerate((1, 1, 5, 5)):
        plan = settle(config, plan_of(llama).device, rank, bounds)
        assert plan.model.dims.num_layers == layers
