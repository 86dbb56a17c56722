"""What goes wrong with the directory that is made is named, and no half of it ever loads."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from slipstream.errors import ConfigError
from slipstream_convert.writer import Writer

TENSORS = {"a": torch.ones(8, 8), "b": torch.ones(8)}


def made(output: Path, source: Path) -> None:
    """Write a small checkpoint."""
    writer = Writer(output)
    try:
        writer.add(TENSORS)
        writer.finish(source, {"config.json": {}})
    finally:
        writer.discard()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


@contextmanager
def files_of(most: int) -> Iterator[None]:
    """Have no file become larger: a write fails as on a full disk, with another number."""
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, whole[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_process_left_is_removed(
    is_there: bool, source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    left = (output if is_there else tmp_path) / ".out.unfinished"
    (left / "folder").mkdir(parents=True)
    (left / "1.part").write_bytes(b"half")
    made(output, source)
    assert names(output) == FILES
    assert names(tmp_path) == ["out", "source"]


def test_the_folder_that_is_there_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another disk may be mounted there, so it cannot be removed; files come in one by one."""
    output = tmp_path / "out"
    output.mkdir()
    number, order = output.stat().st_ino, []
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        order.append(Path(target).name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted)
    monkeypatch.chdir(output)
    made(Path("."), source)
    assert output.stat().st_ino == number
    assert names(output) == FILES
    assert order[-1] == "config.json"


def test_a_link_to_a_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    made(tmp_path / "out", source)
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "elsewhere") == FILES


def test_one_process_at_a_time(source: Path, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "out")
    writer.add(TENSORS)
    with pytest.raises(ConfigError, match="another process is writing it"):
        Writer(tmp_path / "out")
    writer.finish(source, {"config.json": {}})
    writer.discard()
    assert names(tmp_path / "out") == FILES


@pytest.mark.parametrize("most", [100, 400])  # of the tensors, and of the tokenizer's copy
def test_a_full_disk(most: int, source: Path, tmp_path: Path) -> None:
    if most == 400:
        (source / "tokenizer.json").write_bytes(bytes(4096))
    (tmp_path / "out").mkdir()
    with files_of(most), pytest.raises(ConfigError, match=r"--output .*out: cannot be written: "):
        made(tmp_path / "out", source)
    assert names(tmp_path / "out") == []


def test_what_is_no_place(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    wrong = {"file": "there already", "file/out": "Not a directory", "loop": "there already"}
    wrong |= {"source": "there already"}
    for name, message in wrong.items():
        with pytest.raises(ConfigError, match=rf"--output .*{message}"):
            made(tmp_path / name, source)
    writer = Writer(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out: 1,000,000.00 GB will be written, at least, and "):
        writer.check_space(10**15)
    writer.discard()
    assert (tmp_path / "file").read_text() == "mine"
