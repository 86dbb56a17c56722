"""What ranks compare at their start: whatever differs is refused by its name, with both values."""

import dataclasses
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fixtures.bridge.launching import CONFIG
from hypothesis import given
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.runner import facts
from slipstream.runner.facts import compare, facts_of
from slipstream.runner.plan import Plan, resolve
from slipstream_runtime.ranks import RankMemory

ELSEWHERE = ("checkpoint", "draft_checkpoint")  # paths of a host
FIELDS = [each.name for each in msgspec.structs.fields(EngineConfig) if each.name not in ELSEWHERE]
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    (folder / "weights").write_bytes(os.urandom(1 << 20))
    return folder


def plan_of(checkpoint: Path) -> Plan:
    return resolve(EngineConfig(checkpoint=str(checkpoint), device="cpu", load_format="random"))


def said(plans: list[Plan]) -> list[str]:
    """What each rank says of the comparison; empty: it found no difference."""
    descriptor, size = RankMemory.create(len(plans)), len(plans)

    def join(rank: int) -> str:
        try:
            compare(plans[rank], RankMemory(descriptor, size, rank))
        except ConfigError as error:
            return str(error)
        return ""

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(join, range(size)))
    finally:
        os.close(descriptor)


def other(draw: Any, value: object) -> object:
    """Another value, in the place of one of the settings."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + draw(st.integers(1, 9))
    if isinstance(value, float):
        return value + 0.5
    return draw(st.integers(1, 9)) if value is None else f"{value}{draw(TEXTS)}"


@given(st.data())
def test_another_setting(checkpoint: Path, data: st.DataObject) -> None:
    plan = plan_of(checkpoint)
    size = data.draw(st.integers(2, 4))
    rank, name = data.draw(st.integers(0, size - 1)), data.draw(st.sampled_from(FIELDS))
    value = getattr(plan.config, name)
    found = other(data.draw, value)
    config = msgspec.structs.replace(plan.config, **{name: found})
    plans = [plan] * size
    plans[rank] = dataclasses.replace(plan, config=config)
    one, own, theirs = (rank, found, value) if rank else (1, value, found)
    words = said(plans)
    assert len(set(words)) == 1
    assert words[0].startswith(f"rank {one} has another {name} than rank 0: ")
    assert len(words[0]) < 300
    if max(len(repr(each)) for each in (own, theirs)) <= 64:
        assert words[0].endswith(f": {own!r}, not {theirs!r}")
    else:
        shown = words[0].split(" than rank 0: ")[1]
        half = len(shown) // 2
        assert shown[: half - 3] != shown[half + 3 :]


def test_a_value_longer_than_all_that_ranks_say_at_once(checkpoint: Path) -> None:
    plan = plan_of(checkpoint)
    configs = [msgspec.structs.replace(plan.config, adapters=9000 * "a" + end) for end in "xy"]
    plans = [dataclasses.replace(plan, config=config) for config in configs]
    before = "..." + 16 * "a"
    want = f"rank 1 has another adapters than rank 0: {before}y', not {before}x'"
    assert said(plans) == [want] * 2


@pytest.mark.parametrize("name", ["version", "version of torch", "kind of device"])
def test_another_program_or_device(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, real = plan_of(checkpoint), facts.facts_of
    changed = dataclasses.replace(plan)

    def planted(each: Plan) -> dict[str, str]:
        return real(each) | ({name: "other"} if each is changed else {})

    monkeypatch.setattr(facts, "facts_of", planted)
    want = f"rank 2 has another {name} than rank 0: other, not {real(plan)[name]}"
    assert said([plan, plan, changed]) == [want] * 3


def test_another_dtype_by_default(checkpoint: Path) -> None:
    """Settings may be the same and what they come to on a host not."""
    plan = plan_of(checkpoint)
    low = dataclasses.replace(plan, dtype=torch.bfloat16)
    want = "rank 1 has another dtype in use than rank 0: bfloat16, not float32"
    assert said([plan, low]) == [want] * 2


@given(
    st.sampled_from(["config.json", "weights", "more"]), st.integers(0, 2**20 - 1), st.booleans()
)
def test_another_checkpoint(checkpoint: Path, name: str, at: int, is_short: bool) -> None:
    """A byte of a small file, or of the first and last 256 KiB of a large one; size, or names."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(checkpoint, Path(folder) / "other name"))
        path = copy / name
        data = bytearray(path.read_bytes() if path.exists() else b"")
        if is_short and data:
            data.pop()
        elif data:
            at %= len(data)
            at = at if at < 1 << 18 else len(data) - 1 - at % (1 << 18)
            data[at] ^= 1
        plan = plan_of(checkpoint)
        whole = dataclasses.replace(plan, checkpoint=copy)
        assert said([plan, whole]) == ["", ""]
        path.write_bytes(data)
        words = said([plan, whole])
        key = f"{name} of the checkpoint"
        want, found = facts_of(plan).get(key, "none"), facts_of(whole)[key]
    assert words == [f"rank 1 has another {key} than rank 0: {found}, not {want}"] * 2
