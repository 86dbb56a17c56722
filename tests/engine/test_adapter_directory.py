"""A watched directory of adapters: what lies there whole is what is served."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from fixtures.engine.adapted import House
from fixtures.models.adapters import (
    draw_pairs,
    write_adapter,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.engine.adapter_directory import AdapterDirectory

# Acts on a watched directory: a file of an adapter is written or removed, or two looks are taken.
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", ".c"]),
        st.sampled_from(["config", "tensors", "both", "broken", "remove", "look", "looks"]),
        st.integers(0, 2),
    ),
    max_size=14,
)


@given(acts=ACTS)
@settings(max_examples=30, deadline=None)
def test_a_watched_directory_is_what_is_served(
    watched: tuple[House, Path], acts: list[tuple[str, str, int]]
) -> None:
    """Whole adapters alone, and after two looks without a change exactly those that lie there."""
    house, drawn = watched
    root = Path(tempfile.mkdtemp(dir=house.folder))
    house.restart()
    directory = house.store.watch(str(root))
    digests = {house.runner.adapters.read(str(drawn / str(i))).digest: i for i in range(3)}
    there: dict[str, list[int | None]] = {}  # of each name: whose configuration, whose tensors
    touched, before = set[str](), dict[str, int]()  # since the last look
    for clock, (name, act, which) in enumerate([*acts, ("a", "looks", 0)]):
        parts = there.setdefault(name, [None, None])
        touched |= set() if act.startswith("look") else {name}
        if act == "remove":
            shutil.rmtree(root / name, ignore_errors=True)
            parts[:] = None, None
        for part, file in enumerate(("adapter_config.json", "adapter_model.safetensors")):
            if act in (("config", "tensors")[part], "both", "broken"):
                (root / name).mkdir(exist_ok=True)
                content = (drawn / str(which) / file).read_bytes()
                (root / name / file).write_bytes(content[: 99 if act == "broken" else None])
                os.utime(root / name / file, ns=(clock, clock))
                parts[part] = -1 if act == "broken" else which
        for _ in range({"look": 1, "looks": 2}.get(act, 0)):
            directory.look()
            house.store.take_watched()
        house.store.check_integrity()
        served = {each.name: digests[bytes.fromhex(each.digest)] for each in house.store.infos()}
        if act == "look":
            assert all(served.get(each) == before.get(each) for each in touched)
        if act.startswith("look"):
            touched, before = set(), served
        if act == "looks":
            whole = {n: p[1] for n, p in there.items() if p[0] == p[1] and p[0] not in (None, -1)}
            whole.pop(".c", None)
            assert whole.items() <= served.items()
            gone = {n for n, p in there.items() if None in p}
            assert not gone & served.keys()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[House, Path]:
    folder = tmp_path_factory.mktemp("watched")
    house, drawn = House(folder), folder / "drawn"
    for i, rank in enumerate((2, 3, 4)):
        write_adapter(drawn / str(i), draw_pairs(house.model, ["q_proj"], rank, seed=i), rank)
    return house, drawn


def test_a_watched_directory_leaves_other_names_and_stays_when_it_is_away(
    watched: tuple[House, Path],
) -> None:
    house, drawn = watched
    root = Path(tempfile.mkdtemp(dir=house.folder))
    house.restart()
    house.load("a")
    for name in ("a", "c", "base"):
        shutil.copytree(drawn / "0", root / name)
    directory = house.store.watch(str(root))

    def names() -> dict[str, str]:
        directory.look()
        directory.look()
        house.store.take_watched()
        return {each.name: each.path for each in house.store.infos()}

    there = {"a": str(house.folder / "a"), "c": str(root / "c")}
    assert names() == there
    root.rename(root.with_name("away"))
    assert names() == there
    root.with_name("away").rename(root)
    (root / "a" / "adapter_config.json").unlink()
    (root / "c" / "adapter_config.json").unlink()
    assert names() == {"a": there["a"]}
    house.store.unload("a")
    shutil.copy(drawn / "0" / "adapter_config.json", root / "a")
    assert names() == {"a": str(root / "a")}


def test_an_error_of_the_moment_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [MemoryError(), MemoryError(), RuntimeError("can't start new thread")]

    def read(path: str) -> str:
        if errors:
            raise errors.pop(0)
        return path

    write_adapter(tmp_path / "a", {"q_proj": (torch.ones(1, 2), torch.ones(2, 1))}, 1)
    directory = AdapterDirectory(tmp_path, read)
    for _ in range(4):
        directory.look()
        assert not list(directory.take())
    directory.look()
    assert [each.name for each in directory.take()] == ["a"]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "adapter_dir: a is not loaded yet: MemoryError: ",
        "adapter_dir: a is not loaded yet: RuntimeError: can't start new thread",
    ]
