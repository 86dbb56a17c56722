"""A GGUF file in parts is read as if it were one; parts that do not belong together are refused."""

import json
import shutil
from pathlib import Path

import pytest
from fixtures.models.checkpoints import make_model, make_runner
from fixtures.models.gguf_files import SIZES, unpacked, write_gguf
from slipstream.errors import CheckpointError
from slipstream.models.gguf.parts import read_gguf


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(make_model("qwen2", **SIZES), "qwen2", folder / "m.gguf", "Q8_0", tensors_per_part=9)
    return sorted(folder.glob("*.gguf"))


@pytest.fixture
def copies(parts: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(part, tmp_path)) for part in parts]


def test_parts_are_what_the_whole_is(parts: list[Path], tmp_path: Path) -> None:
    assert len(parts) > 2
    whole = write_gguf(make_model("qwen2", **SIZES), "qwen2", tmp_path / "m.gguf", "Q8_0")
    one, several = read_gguf(whole), read_gguf(parts[0])
    assert several.num_bytes == sum(part.stat().st_size for part in parts)
    assert set(several.tensors) == set(one.tensors)
    for name, tensor in one.tensors.items():
        other = several.tensors[name]
        assert (other.type, other.shape) == (tensor.type, tensor.shape)
        mine, theirs = (each.path.read_bytes()[each.begin : each.end] for each in (tensor, other))
        assert mine == theirs


def test_they_are_served(parts: list[Path], tmp_path: Path) -> None:
    assert make_runner(unpacked(parts[0], tmp_path)).num_blocks


def test_another_part_than_the_first_is_refused(parts: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"not the first of .* name that, .*-00001-of-"):
        read_gguf(parts[1])


def test_a_part_that_is_missing_is_named(copies: list[Path]) -> None:
    copies[1].unlink()
    with pytest.raises(CheckpointError, match=r"-00002-of-.*no such file"):
        read_gguf(copies[0])


def test_parts_in_each_others_place_are_refused(copies: list[Path]) -> None:
    shutil.copy(copies[2], copies[1])
    with pytest.raises(CheckpointError, match=r"split.no = 2, not 1"):
        read_gguf(copies[0])


def test_a_file_under_another_name_is_refused(copies: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"not named as one of so many parts"):
        read_gguf(copies[0].rename(copies[0].with_name("other.gguf")))


def test_a_part_that_changed_is_found_out(copies: list[Path], tmp_path: Path) -> None:
    directory = unpacked(copies[0], tmp_path / "made")
    reference = json.loads((directory / "gguf.json").read_text())
    assert reference["bytes"] == sum(each.stat().st_size for each in copies)
    with copies[1].open("ab") as file:
        file.write(b"0")
    with pytest.raises(CheckpointError, match="run `slipstream compose` again"):
        make_runner(directory)
