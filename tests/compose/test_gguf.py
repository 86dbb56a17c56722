"""A GGUF file in a repository: its small files are composed, the weights stay where they are."""

import json
import shutil
from pathlib import Path

import pytest
from fixtures.composing import run, settings, tree
from fixtures.models.checkpoints import make_model, make_runner
from fixtures.models.gguf_files import SIZES, write_gguf
from slipstream.errors import CheckpointError
from slipstream_contract.tensors import MODELS

MADE = ("config", "generation_config", "gguf", "tokenizer", "tokenizer_config")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("downloads") / "A-Model.Q8_0.gguf"
    return write_gguf(make_model("qwen2", **SIZES), "qwen2", path, "Q8_0")


def made(output: Path, engine_model: str = "tensorrt_llm") -> Path:
    return output / engine_model / "1" / "checkpoint"


def test_a_repository_has_every_model_and_is_the_same_again(file, tmp_path, capsys):
    assert run(file, tmp_path) == 0
    first = tree(tmp_path)
    assert {path.partition("/")[0] for path in first} == set(MODELS)
    assert set(tree(made(tmp_path))) == {f"{name}.json" for name in MADE}
    assert settings(tmp_path)["engine"] == {"checkpoint": "checkpoint", "model": "A-Model.Q8_0"}
    assert json.loads((made(tmp_path) / "gguf.json").read_text())["file"] == str(file)
    capsys.readouterr()
    assert run(file, tmp_path) == 0
    assert "wrote" not in capsys.readouterr().out
    assert run(file, tmp_path, "--check") == 0
    assert tree(tmp_path) == first


def test_the_repository_loads(file, tmp_path):
    run(file, tmp_path)
    assert make_runner(made(tmp_path)).num_blocks


@pytest.mark.parametrize("scheme", ["auto", "none", "int8"])
def test_weights_that_are_rounded_once_more_are_named(file, tmp_path, capsys, scheme):
    assert run(file, tmp_path, "--quantization", scheme) == 0
    line = (
        "the file's weights are quantised already (Q8_0): quantization = 'int8' rounds them once "
        "more, auto does not\n"
    )
    assert (line in capsys.readouterr().out) == (scheme == "int8")


def test_a_named_deployment_has_its_own(file, tmp_path):
    run(file, tmp_path, "--name", "one")
    run(file, tmp_path, "--name", "two")
    assert tree(made(tmp_path, "one_tensorrt_llm")) == tree(made(tmp_path, "two_tensorrt_llm"))
    text = (tmp_path / "two_preprocessing" / "config.pbtxt").read_text()
    assert '"../../two_tensorrt_llm/1/checkpoint"' in text


def test_a_file_in_the_repository_moves_with_it(file, tmp_path):
    inside = tmp_path / "before" / "tensorrt_llm" / "1" / "weights.gguf"
    inside.parent.mkdir(parents=True)
    shutil.copyfile(file, inside)
    run(inside, tmp_path / "before")
    assert json.loads((made(tmp_path / "before") / "gguf.json").read_text())["file"] == (
        "../weights.gguf"
    )
    (tmp_path / "before").rename(tmp_path / "after")
    make_runner(made(tmp_path / "after"))


def test_files_of_an_earlier_checkpoint_are_removed(file, tmp_path, capsys):
    run(file, tmp_path)
    (made(tmp_path) / "chat_template.jinja").write_text("of another file")
    run(file, tmp_path)
    assert "removed tensorrt_llm/1/checkpoint/chat_template.jinja" in capsys.readouterr().out
    assert set(tree(made(tmp_path))) == {f"{name}.json" for name in MADE}


def test_a_directory_after_a_file_leaves_nothing_of_it(file, checkpoint, tmp_path):
    run(file, tmp_path)
    run(checkpoint, tmp_path)
    assert not made(tmp_path).exists()
    assert settings(tmp_path)["engine"]["checkpoint"] == str(checkpoint)


def test_another_checkpoint_in_their_place_is_left_alone(file, tmp_path):
    made(tmp_path).mkdir(parents=True)
    (made(tmp_path) / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint is not made of a GGUF file: move it"):
        run(file, tmp_path)
    assert tree(tmp_path) == {"tensorrt_llm/1/checkpoint/config.json": b"{}"}


def test_a_file_that_cannot_be_served_leaves_nothing(file, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"bad\.gguf: truncated: tensor"):
        run(bad, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"absent\.gguf: no such file"):
        run(tmp_path / "absent.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_draft_model_may_be_a_gguf_file(file, tmp_path):
    flags = ("--speculation", "draft", "--draft-checkpoint", str(file))
    assert run(file, tmp_path, *flags) == 0
    folder = tmp_path / "tensorrt_llm" / "1" / "draft_checkpoint"
    assert settings(tmp_path)["engine"]["draft_checkpoint"] == "draft_checkpoint"
    assert json.loads((folder / "gguf.json").read_text())["file"] == str(file)
    assert run(file, tmp_path, *flags, "--check") == 0
    assert make_runner(made(tmp_path), speculation="draft", draft_checkpoint=str(folder))
    assert run(file, tmp_path) == 0
    assert not folder.exists()


def test_a_draft_in_gguf_needs_the_tokens_of_its_target(file, tmp_path):
    one = b"\x01" + bytes(7)  # the length of a token
    first, second = one + b"!", one + b'"'
    data = file.read_bytes()
    assert data.count(first + second) == 1
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace(first + second, second + first))
    flags = ("--speculation", "draft", "--draft-checkpoint", str(other))
    with pytest.raises(CheckpointError) as caught:
        run(file, tmp_path / "out", *flags)
    said = f"{other}/tokenizer.json: token '!' is 3, but 2 in {file}/tokenizer.json"
    assert str(caught.value).startswith(said)
    assert not (tmp_path / "out").exists()
