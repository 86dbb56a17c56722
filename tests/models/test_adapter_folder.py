"""A directory of a client's choice: nothing outside the root is opened, whatever lies or moves."""

import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from safetensors.torch import load_file, save_file
from slipstream.engine.adapters import AdapterStore
from slipstream.errors import CheckpointError
from slipstream.models.adapters.patterns import Pattern
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.errors import ContractError

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_opened: list[tuple[str, int]] = []  # real path and flags of what Python opens
_is_watched = False


def _watch(event: str, given: tuple[object, ...]) -> None:
    if _is_watched and event == "open" and isinstance(given[0], str | bytes | os.PathLike):
        _opened.append((os.path.realpath(os.fsdecode(given[0])), int(str(given[2] or 0))))


sys.addaudithook(_watch)


@pytest.fixture
def watched() -> Iterator[list[tuple[str, int]]]:
    """What is opened while the test runs; hooks cannot be removed, so one is for all."""
    global _is_watched
    _opened.clear()
    _is_watched = True
    yield _opened
    _is_watched = False


@pytest.fixture
def folder(base: torch.nn.Module, tmp_path: Path) -> Path:
    """An adapter below a root, and another one outside."""
    (tmp_path / "root").mkdir()
    targets = targets_of(base)
    write_adapter(tmp_path / "outside", draw_pairs(base, targets, 3, seed=1), 3)
    return write_adapter(tmp_path / "root/own", draw_pairs(base, targets, 3), 3)


def link(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder.parents[1] / "outside" / name)

    return change


def swap(folder: Path) -> None:
    """Put a link to the other adapter where the directory was."""
    folder.rename(folder.with_name("away"))
    folder.symlink_to(folder.parents[1] / "outside")


def pipe(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link of the configuration": (link(CONFIG), f"{CONFIG}: leads out of adapter_root"),
    "a link of the tensors": (link(TENSORS), f"{TENSORS}: leads out of adapter_root"),
    "a swap behind the look": (swap, "own: leads out of adapter_root"),
    "a pipe": (pipe(CONFIG), f"{CONFIG}: is no file"),
    "a pipe of tensors": (pipe(TENSORS), f"{TENSORS}: is no file"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_nothing_outside_the_root_is_opened(
    case: str,
    folder: Path,
    runner: ModelRunner,
    watched: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The directory changes after the engine has looked at its path, before it is read."""
    change, why = CHANGES[case]
    root = folder.parent
    store = AdapterStore(runner.adapters, str(root), "base")
    inside = store._inside

    def look(path: str) -> str:
        found = inside(path)
        change(folder)
        return found

    monkeypatch.setattr(store, "_inside", look)
    answers: list[ContractError | None] = []
    store.start_load("x", "own", answers.append)
    while store.is_loading:
        store.poll()
    assert answers[0] is not None
    assert why in answers[0].message
    outside = str((root.parent / "outside").resolve())
    read = [path for path, flags in watched if not flags & os.O_PATH]
    assert watched, "the hook sees what is opened"
    assert not [path for path in read if path.startswith(outside)]


def test_links_below_the_root_are_followed(folder: Path, runner: ModelRunner) -> None:
    """A cache of Hugging Face's hub has links to files beside its snapshots."""
    root = folder.parent
    (root / "blobs").mkdir()
    for name in (TENSORS, CONFIG):
        (folder / name).rename(root / "blobs" / name)
        (folder / name).symlink_to(Path("../blobs") / name)
    assert runner.adapters.read(str(folder), str(root)).rank == 3
    assert runner.adapters.read(str(folder)).rank == 3


def test_what_is_larger_than_any_adapter_is_not_read(folder: Path, runner: ModelRunner) -> None:
    """Files with holes: a TB of zeros take no room on the disk, and would take all memory."""
    name, size = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", 1 << 38
    entry = {"dtype": "F32", "shape": [512, size >> 9], "data_offsets": [0, 4 * size]}
    text = json.dumps({name: entry}).encode()
    (folder / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / TENSORS, 8 + len(text) + 4 * size)
    with pytest.raises(CheckpointError, match=r"q_proj.lora_A.weight is \[512, .*more than the"):
        runner.adapters.read(str(folder))
    (folder / TENSORS).write_bytes(struct.pack("<Q", 50 << 20))
    os.truncate(folder / TENSORS, 100 << 20)
    with pytest.raises(CheckpointError, match="its header has 52428800 bytes, at most 16777216"):
        runner.adapters.read(str(folder))
    os.truncate(folder / CONFIG, 5 << 20)
    with pytest.raises(CheckpointError, match=f"{CONFIG}: has more than 4194304 bytes"):
        runner.adapters.read(str(folder))


def test_a_module_by_two_names_is_refused(folder: Path, runner: ModelRunner) -> None:
    tensors = load_file(folder / TENSORS)
    module = "model.layers.0.self_attn.q_proj"
    again = {
        name.replace("model.layers", "model.language_model.layers"): x.clone()
        for name, x in tensors.items()
        if module in name
    }
    save_file(tensors | again, folder / TENSORS)
    with pytest.raises(CheckpointError, match=r"q_proj is model.l.*q_proj by another name"):
        runner.adapters.read(str(folder))


@pytest.mark.parametrize("shape", [(), (1,), (33,), (32, 1)])
def test_magnitudes_are_one_for_each_output(
    shape: tuple[int, ...], base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    pairs = draw_pairs(base, ["q_proj"], 3)
    folder = write_adapter(tmp_path / "x", pairs, 3, use_dora=True)
    tensors = load_file(folder / TENSORS)
    sizes = {f"base_model.model.{name}.lora_magnitude_vector": torch.ones(32) for name in pairs}
    save_file(tensors | sizes, folder / TENSORS)
    runner.adapters.read(str(folder))
    sizes = {name: torch.ones(shape) for name in sizes}
    save_file(tensors | sizes, folder / TENSORS)
    with pytest.raises(CheckpointError, match=r"lora_magnitude_vector is \[.*\], not \[32\]"):
        runner.adapters.read(str(folder))


@pytest.mark.parametrize(
    "text",
    ["(a+)+b", "(a|a)" * 30, "a?" * 40, ".*.*.*x", r"(\w+\.)*x", "(?=a)b", r"(.)\1", "(" * 400],
)
def test_patterns_that_could_search_for_hours_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ways|not implemented|no regex"):
        Pattern(text)


@pytest.mark.parametrize(
    ("text", "is_meant"),
    [
        ("q_proj", True),
        ("proj", False),
        (r"layers\.[0-4]\..*_proj", True),
        (r"model\.layers\.(1|2|3|10|31)\.self_attn\.(q|k|v|o)_proj", True),
        (r"^model\.layers\.3\.self_attn\.q_proj$", True),
        (".*layers.*", True),
        (r"layers\.\d+\.mlp.*", False),
    ],
)
def test_patterns_mean_what_they_mean_to_peft(text: str, is_meant: bool) -> None:
    assert Pattern(text).matches("model.layers.3.self_attn.q_proj") == is_meant
