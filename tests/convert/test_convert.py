"""Pickled checkpoints become safetensors with the same bits, and none of their code runs."""

import json
import os
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, write_adapter
from fixtures.models.checkpoints import make_model, make_runner, save
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.files import tensor_entries
from slipstream_client import cli
from slipstream_convert.convert import convert
from slipstream_convert.pickles import INDEX

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def write(folder: Path, shards: list[dict[str, object]], legacy: bool = False) -> Path:
    """Pickle tensors, by an index if they are in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "any"}')
    if len(shards) == 1:
        names = ["pytorch_model.bin"]
    else:
        names = [f"pytorch_model-{i}-of-{len(shards)}.bin" for i in range(1, len(shards) + 1)]
        found = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (folder / INDEX).write_text(json.dumps({"weight_map": found}))
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, folder / name, _use_new_zipfile_serialization=not legacy)
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    files = {entry.file for entry in tensor_entries(folder).values()}
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    num_shards=st.integers(1, 3),
    kinds=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=8),
    shard_bytes=st.integers(1, 200),
    legacy=st.booleans(),
)
def test_names_dtypes_and_bits_stay(
    sizes, num_shards, kinds, shard_bytes, legacy, tmp_path_factory
) -> None:
    tmp_path = tmp_path_factory.mktemp("convert")
    tensors = {
        f"t.{i}": (torch.randn(size) * 50).to(kinds[i % len(kinds)]) for i, size in enumerate(sizes)
    }
    tensors["transposed"] = torch.arange(6.0).view(2, 3).T
    tensors["of a shared storage"] = tensors["transposed"][1:]
    shards = [dict(list(tensors.items())[i::num_shards]) for i in range(num_shards)]
    source = write(tmp_path / "in", [shard for shard in shards if shard], legacy)
    count, num_bytes = convert(source, tmp_path / "out", shard_bytes)
    found = read(tmp_path / "out")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].equal(tensor) or tensor.isnan().any()
    assert (count, num_bytes) == (len(tensors), sum(x.nbytes for x in tensors.values()))
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "any"}'


def test_the_error_names_the_command_and_its_copy_loads(tmp_path: Path, capsys) -> None:
    source = save(make_model("llama"), tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    pickled = tmp_path / "pickled"
    write(pickled, [weights])
    (pickled / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="slipstream convert"):
        make_runner(pickled)
    assert cli.main(["convert", str(pickled)]) == 0
    assert f"pickled-safetensors: {len(weights)} tensors" in capsys.readouterr().out
    found = read(tmp_path / "pickled-safetensors")
    assert all(found[name].equal(tensor) for name, tensor in weights.items())
    make_runner(tmp_path / "pickled-safetensors")


def test_an_adapter_of_early_peft_is_converted_as_its_error_says(tmp_path: Path, capsys) -> None:
    model = make_model("llama")
    runner = make_runner(save(model, tmp_path / "model"))
    folder = write_adapter(tmp_path / "a", draw_pairs(model, ["q_proj", "up_proj"], 3), 3)
    wanted = runner.adapters.read(str(folder)).digest
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"\(adapter_model.bin\): `slipstream convert`"):
        runner.adapters.read(str(folder))
    assert cli.main(["convert", str(folder)]) == 0
    assert "a-safetensors: 8 tensors" in capsys.readouterr().out
    made = tmp_path / "a-safetensors"
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in made.iterdir()} == names
    assert runner.adapters.read(str(made)).digest == wanted
    assert cli.main(["convert", str(made)]) == 1
    assert "adapter_model.safetensors: the weights are safetensors" in capsys.readouterr().err


def test_a_file_is_told_from_a_directory_that_is_not_there(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "in", [{"a": torch.ones(2)}])
    assert cli.main(["convert", str(source / "pytorch_model.bin")]) == 1
    error = capsys.readouterr().err
    assert f"pytorch_model.bin: is a file; name its directory, {source}" in error
    assert cli.main(["convert", str(tmp_path / "none")]) == 1
    assert "none: no such directory" in capsys.readouterr().err


def test_shards_without_an_index_are_named(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "in", [{str(i): torch.ones(2)} for i in range(9)])
    (source / INDEX).unlink()
    assert cli.main(["convert", str(source)]) == 1
    error = capsys.readouterr().err
    assert f"{INDEX} is missing, which names the shards: 'pytorch_model-1-of-9.bin'" in error
    assert "'pytorch_model-8-of-9.bin' and 1 more" in error
    for path in source.glob("pytorch_model-[2-9]*"):
        path.unlink()
    (source / "pytorch_model-1-of-9.bin").rename(source / "consolidated.00.pth")
    assert cli.main(["convert", str(source)]) == 1
    assert "has neither pytorch_model.bin nor " in (error := capsys.readouterr().err)
    assert "'consolidated.00.pth' is not read" in error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


class Evil:
    """What a pickle may name: a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_is_named_and_not_run(legacy: bool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    source = write(tmp_path / "in", [{"a": torch.ones(2), "b": Evil(trace)}], legacy)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*posix.system"):
        convert(source, tmp_path / "out")
    assert not trace.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def damage(folder: Path, kind: str) -> None:
    one, ones = folder / "pytorch_model.bin", {"a": torch.ones(300)}
    write(folder, [ones])
    if kind == "truncated":
        one.write_bytes(one.read_bytes()[:-700])
    elif kind == "truncated legacy":
        write(folder, [ones], legacy=True)
        one.write_bytes(one.read_bytes()[:-700])
    elif kind == "empty":
        one.write_bytes(b"")
    elif kind == "pointer":
        one.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == "meta":
        write(folder, [{"a": torch.ones(2, device="meta")}])
    elif kind == "not by name":
        write(folder, [[torch.ones(1)]])  # type: ignore[list-item]
    elif kind == "within":
        write(folder, [{"state_dict": ones}])
    elif kind == "sparse":
        write(folder, [{"a": torch.eye(3).to_sparse()}])
    elif kind == "complex":
        write(folder, [{"a": torch.ones(3, dtype=torch.complex64)}])
    elif kind == "expanded":  # a file of some 1 kB that would be 40 TB
        write(folder, [{"a": torch.ones(1).expand(10**6, 10**7)}])
    elif kind == "reserved":
        write(folder, [{"__metadata__": torch.ones(1)}])
    elif kind == "a text":
        one.write_bytes(b"hello")
    elif kind == "twice":
        write(folder, [{"a": torch.ones(1)}, {"a": torch.ones(1)}])
        files = sorted(path.name for path in folder.glob("pytorch_model-*"))
        (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", files, strict=True))}))
    elif kind == "missing":
        (folder / INDEX).write_text('{"weight_map": {"a": "pytorch_model.bin", "b": "x.bin"}}')
    elif kind == "outside":
        (folder / INDEX).write_text('{"weight_map": {"a": "../pytorch_model.bin"}}')
    elif kind == "not there":
        index = {"weight_map": {"a": "pytorch_model.bin", "b": "pytorch_model.bin"}}
        (folder / INDEX).write_text(json.dumps(index))
    elif kind == "none":
        one.unlink()
    elif kind == "safetensors":
        (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "pytorch_model.bin: cannot be read"),
        ("truncated legacy", "pytorch_model.bin: cannot be read"),
        ("empty", "pytorch_model.bin: cannot be read"),
        ("pointer", "pytorch_model.bin: a pointer of Git LFS in the place of the file"),
        ("meta", "tensor 'a' is of device meta: no data"),
        ("not by name", "holds list, not tensors by name"),
        ("within", "'state_dict' is of type dict"),
        ("sparse", "sparse_coo"),
        ("complex", "complex64"),
        ("expanded", "'a' is [1000000, 10000000], 40000000000000 bytes, of 4 that are there"),
        ("reserved", "__metadata__ is no name that a tensor may have"),
        ("a text", "pytorch_model.bin: cannot be read as tensors: it is no pickle (KeyError: 101)"),
        ("twice", "is also in pytorch_model-1-of-2.bin"),
        ("missing", "x.bin: no such file"),
        ("outside", "is not a file name"),
        ("not there", "no tensor 'b', but pytorch_model.bin.index.json says so"),
        ("none", "has neither pytorch_model.bin nor"),
        ("safetensors", "safetensors already"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_left(kind: str, words: str, tmp_path: Path) -> None:
    damage(tmp_path / "in", kind)
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "in", tmp_path / "out")
    assert words in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_output_that_exists_is_left_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [{"a": torch.ones(1)}])
    with pytest.raises(ConfigError, match="there already"):
        convert(source, source)
