"""Packed weights on disk: what is mapped is what was made, and what is damaged is made again."""

import errno
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slipstream.errors import CheckpointError
from slipstream.kernels.cpu.native import library
from slipstream.kernels.gemm.op import Matrix
from slipstream.models import packed_store
from slipstream.models.packed_store import PackedStore, path_of
from slipstream.quant.forms import make_tiles
from slipstream.quant.rounding import rounded4, rounded8
from slipstream.runner import load_weights

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 150), st.sampled_from([4, 8]))


def matrix(outputs: int, inputs: int, bits: int, seed: int) -> Matrix:
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return make_tiles((rounded4 if bits == 4 else rounded8)(weight))


def tensors(of: Matrix) -> list[torch.Tensor]:
    assert of.groups is not None
    return [x for x in (of.values, of.groups.scales, of.groups.minimums) if x is not None]


def is_same(one: Matrix | None, other: Matrix) -> bool:
    assert one is not None
    assert one.groups is not None
    assert other.groups is not None
    both = zip(tensors(one), tensors(other), strict=True)
    return one.groups.packing == other.groups.packing and all(torch.equal(*each) for each in both)


def kept(path: Path, matrices: Sequence[Matrix]) -> None:
    store = PackedStore(path)
    for number, each in enumerate(matrices):
        store.keep(str(number), each)
    store.finish()


def sizes_of(of: Matrix) -> tuple[int, int]:
    assert of.groups is not None
    return of.groups.packing.outputs, of.groups.packing.inputs


@given(st.lists(SIZES, min_size=1, max_size=4))
def test_what_is_mapped_is_what_was_made(drawn: list[tuple[int, int, int]]) -> None:
    made = [matrix(*each, seed) for seed, each in enumerate(drawn)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "folder" / "one.weights"
        kept(path, made)
        store = PackedStore(path)
        for number, each in enumerate(made):
            found = store.take(str(number), *sizes_of(each))
            assert is_same(found, each)
            assert found is not None
            assert all(x.data_ptr() % 64 == 0 for x in tensors(found))
        assert store.take("0", 1000, 1000) is None
        assert store.take("another", *sizes_of(made[0])) is None


@given(st.lists(SIZES, min_size=1, max_size=3), st.data())
def test_damage_is_found_and_made_good(
    drawn: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """A changed byte, wherever, or a file cut off: never other weights, and no error."""
    made = [matrix(*each, seed) for seed, each in enumerate(drawn)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "one.weights"
        kept(path, made)
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            whole[at] ^= data.draw(st.integers(1, 255))
        else:
            del whole[at:]
        path.write_bytes(whole)
        store = PackedStore(path)
        for number, each in enumerate(made):
            found = store.take(str(number), *sizes_of(each))
            assert found is None or is_same(found, each)
            if found is None:
                store.keep(str(number), each)
        store.finish()
        again = PackedStore(path)
        assert all(is_same(again.take(str(n), *sizes_of(x)), x) for n, x in enumerate(made))


def test_what_is_mapped_outlives_its_file(tmp_path: Path) -> None:
    """Two starts at once both write; neither loses what it has."""
    path, made = tmp_path / "one.weights", matrix(32, 64, 4, 0)
    kept(path, [made])
    first, second = PackedStore(path), PackedStore(path)
    found = first.take("0", 32, 64)
    second.keep("0", matrix(32, 64, 8, 1))
    second.finish()
    assert is_same(found, made)
    assert is_same(PackedStore(path).take("0", 32, 64), matrix(32, 64, 8, 1))
    assert os.listdir(tmp_path) == ["one.weights"]


@pytest.mark.parametrize("kind", ["no folder", "full", "small"])
def test_a_disk_without_room_is_no_fault(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    if kind == "no folder":
        folder.write_text("a file")
    elif kind == "full":

        def fails(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(packed_store, "_write_to", fails)
    else:
        monkeypatch.setattr(packed_store, "_MOST", 100)
    with caplog.at_level(logging.INFO):
        kept(folder / "one.weights", [matrix(32, 64, 4, 0)])
    assert "are not kept" in caplog.text
    assert kind == "no folder" or os.listdir(folder) == []


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = matrix(32, 64, 4, 0)
    for number in range(3):
        kept(tmp_path / f"{number}.weights", [made])
        os.utime(tmp_path / f"{number}.weights", (number, number))
    size = (tmp_path / "0.weights").stat().st_size
    assert PackedStore(tmp_path / "0.weights").take("0", 32, 64) is not None  # used just now
    monkeypatch.setattr(packed_store, "_MOST", 3 * size)
    kept(tmp_path / "3.weights", [made])
    assert sorted(os.listdir(tmp_path)) == ["0.weights", "2.weights", "3.weights"]


def test_a_file_written_anew_is_another(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    first = path_of([file], ["int4"])
    assert path_of([file], ["int4"]) == first != path_of([file], ["int8"])
    (tmp_path / "new").write_bytes(b"two")
    (tmp_path / "new").replace(file)
    os.utime(file, ns=times)
    assert path_of([file], ["int4"]) != first


def outputs(directory: Path, quantization: str) -> list[list[int]]:
    generations = [Generation(prompt, 5) for prompt in random_prompts([11, 30])]
    Driver(make_runner(directory, quantization=quantization)).finish(generations)
    return [each.outputs for each in generations]


@pytest.mark.skipif(library() is None, reason="only what the processor's kernels take is kept")
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_second_start_maps_what_the_first_packed(
    quantization: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_weights, "MIN_ELEMENTS", 0)
    directory = save(make_model("llama", hidden_size=64, attention_bias=True), tmp_path / "model")
    with caplog.at_level(logging.INFO):
        first = outputs(directory, quantization)
        assert "are kept in" in caplog.text
        caplog.clear()
        assert outputs(directory, quantization) == first
    assert "are those in" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert outputs(directory, quantization) == first


@pytest.mark.skipif(library() is None, reason="only what the processor's kernels take is kept")
def test_weights_that_are_refused_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_weights, "MIN_ELEMENTS", 0)
    directory = save(make_model("llama", hidden_size=64), tmp_path / "model")
    file = directory / "model.safetensors"
    values = load_file(file)
    name = next(name for name in values if name.endswith("q_proj.weight"))
    values[name][0, 0] = torch.nan
    save_file(values, file, metadata={"format": "pt"})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="NaN"):
            make_runner(directory, quantization="int8")
    assert not (tmp_path / "cache" / "slipstream" / "packed").exists()
