"""Threads of a step and scheme of weights on a CPU: what is measured, chosen and kept."""

import json
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import make_model, save
from hypothesis import given
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream.kernels.cpu.native import library
from slipstream.runner import host, scheme_choice, threads
from slipstream.runner.host import Cores, cores
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import THREADS, resolve


@given(
    st.integers(1, 2), st.integers(1, 4), st.integers(1, 2), st.data(), st.booleans(), st.booleans()
)
def test_cores_are_those_of_the_kernels_topology(
    packages: int, each: int, siblings: int, data: st.DataObject, has_nodes: bool, is_known: bool
) -> None:
    """Processors that share a core count once, those that this process may not use never."""
    places = [(p, c) for _ in range(siblings) for p in range(packages) for c in range(each)]
    allowed = data.draw(st.frozensets(st.sampled_from(range(len(places))), min_size=1))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for cpu, (package, core) in enumerate(places):
            folder = root / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            if is_known:
                (folder / "physical_package_id").write_text(f"{package}\n")
                (folder / "core_id").write_text(f"{core}\n")
        of_package: dict[int, set[int]] = {}
        for package in range(packages if has_nodes else 0):
            own = [cpu for cpu, place in enumerate(places) if place[0] == package]
            (root / f"node{package}").mkdir()
            (root / f"node{package}" / "cpulist").write_text(",".join(map(str, own)) + "\n")
            of_package[package] = set(own)
        found = cores(allowed, root, root)

    def count(cpus: frozenset[int]) -> int:
        return len({places[cpu] for cpu in cpus} if is_known else cpus)

    of_node = max((count(allowed & own) for own in of_package.values()), default=count(allowed))
    assert found == Cores(count(allowed), of_node)


@given(st.integers(1, 200), st.data())
def test_the_most_threads_are_tried_first(count: int, data: st.DataObject) -> None:
    of_node = data.draw(st.integers(1, count))
    found = threads.candidates(Cores(count, of_node))
    assert found == sorted(set(found), reverse=True)
    assert found[0] == count
    assert found[-1] == 1
    assert {of_node, max(1, count - 1), max(1, count // 2)} <= set(found)


SECONDS = st.sampled_from([0.001, 0.004, 0.015, 0.03, 0.5, 3.0])


@given(st.dictionaries(st.integers(1, 8), st.tuples(SECONDS, SECONDS), min_size=1))
def test_the_best_is_as_fast_as_any_and_leaves_a_core(times: dict[int, tuple[float, ...]]) -> None:
    most = max(times)
    chosen = threads.best(times, most)

    def cost(count: int) -> float:
        return (times[count][0] * times[count][1]) ** 0.5

    is_long = times[most][0] > 0.02
    assert chosen != most or is_long or len(times) == 1
    others = [count for count in times if count != most or is_long or len(times) == 1]
    assert cost(chosen) * 0.97 <= min(map(cost, others)) * (1 + 1e-9)
    assert all(cost(n) * 0.97 > min(map(cost, others)) * (1 - 1e-9) for n in others if n < chosen)


@given(st.lists(st.integers(1, 64), min_size=1, unique=True), SECONDS)
def test_measuring_ends_in_time(counts: list[int], seconds: float) -> None:
    taken = []

    def timer(count: int, rows: int) -> float:
        taken.append(seconds)
        return seconds

    found = threads.measure(counts, timer)
    assert sum(taken) - seconds <= 0.8 + 1e-9
    assert list(found) == counts[: len(found)]
    assert found


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    host.facts()  # the library is built, and loaded, before others are looked for elsewhere
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.setattr(threads, "cores_here", lambda: Cores(3, 3))
    monkeypatch.setattr(threads, "is_busy", lambda count: False)
    model = make_model("llama", hidden_size=64).bfloat16()
    return save(model, tmp_path / "checkpoint")


def kept(tmp_path: Path, kind: str) -> list[Path]:
    return list((tmp_path / "cache" / "slipstream" / "cpu").glob(f"{kind}-*.json"))


def test_threads_are_measured_once(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = torch.get_num_threads()
    plan = resolve(EngineConfig(checkpoint=str(checkpoint), device="cpu", kv_cache_tokens=1024))
    runner = ModelRunner(plan)
    try:
        assert threads.chosen(plan, runner) is plan  # a small model
        monkeypatch.setattr(threads, "MIN_ELEMENTS", 0)
        with monkeypatch.context() as busy:
            busy.setattr(threads, "is_busy", lambda count: count == 3)
            assert threads.chosen(plan, runner) is plan
            assert not kept(tmp_path, "threads")
        with caplog.at_level(logging.INFO):
            first = threads.chosen(plan, runner).num_threads
        (path,) = kept(tmp_path, "threads")
        assert "of 3 cores, measured: ms of a step of 1 and 16 rows by threads: " in caplog.text
        assert f"kept in {path}" in caplog.text
        assert first in (1, 2, 3)
        assert torch.get_num_threads() == first
        path.write_text(json.dumps({"threads": 3}))
        again = threads.chosen(plan, runner)
        assert again.num_threads == 3
        assert "CPU, 3 threads" in again.banner(9)
        for wrong in ("{", '{"threads": 4}', '{"threads": "2"}', "[]"):
            path.write_text(wrong)
            assert threads.chosen(plan, runner).num_threads in (1, 2, 3)
            assert json.loads(path.read_text())["seconds"]
        monkeypatch.setenv(THREADS, "1")
        assert threads.chosen(plan, runner) is plan
    finally:
        torch.set_num_threads(before)


def test_sixteen_bits_become_eight_where_that_is_faster(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if library() is None:
        pytest.skip("no CPU kernels")
    config = EngineConfig(checkpoint=str(checkpoint), device="cpu")
    assert scheme_choice.resolve(config).config == config  # a small model
    monkeypatch.setattr(scheme_choice, "MIN_ELEMENTS", 0)
    scheme_choice.resolve(config)
    (path,) = kept(tmp_path, "scheme")
    assert len(json.loads(path.read_text())["times_as_fast"]) == 2
    with caplog.at_level(logging.INFO):
        for times, name in (([1.2, 0.8], "int8"), ([1.1, 9.0], "auto"), ([9.0, 0.7], "auto")):
            path.write_text(json.dumps({"times_as_fast": times}))
            assert scheme_choice.resolve(config).config.quantization == name
    assert (
        "become int8: int8 is 1.2 times as fast with one row, 0.8 with 128, as measured"
        in caplog.text
    )
    path.write_text(json.dumps({"times_as_fast": [9, 9]}))
    assert "int8 weights" in scheme_choice.resolve(config).banner(9)
    plain = ({"quantization": "none"}, {"dtype": "float32"}, {"load_format": "random"})
    for asked in (*plain, {"deterministic": True}):  # which has the same bits on every machine
        own = EngineConfig(checkpoint=str(checkpoint), device="cpu", **asked)
        assert scheme_choice.resolve(own).config == own
    whole = save(make_model("llama", hidden_size=64), tmp_path / "float32")
    own = EngineConfig(checkpoint=str(whole), device="cpu")
    assert scheme_choice.resolve(own).config == own
