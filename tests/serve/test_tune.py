"""The command `slipstream tune`: whose configuration the engine's Python gets to measure."""

import argparse
import json
from pathlib import Path

import pytest
from slipstream_client.cli import OneLineParser
from slipstream_compose.compose import ComposeError
from slipstream_serve import rank, tune


def parse(*arguments: str) -> argparse.Namespace:
    parser = OneLineParser()
    tune.add_parser(parser.add_subparsers())
    return parser.parse_args(["tune", *arguments])


def repository(folder: Path, engine: object) -> Path:
    path = folder / "tensorrt_llm" / "1" / "model.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"wiring": "composed", "engine": engine}))
    return folder


def test_of_a_repository(noting_python: Path, tmp_path: Path) -> None:
    root = repository(tmp_path / "models", {"checkpoint": "here", "dtype": "float16"})
    assert tune.run(parse("--model-repository", str(root))) == 3
    arguments, config = json.loads(noting_python.read_text())
    assert arguments == ["-P", "-m", "slipstream.runner.tune"]
    assert config["checkpoint"] == str(root / "tensorrt_llm" / "1" / "here")
    assert config["dtype"] == "float16"


def test_of_a_checkpoint(
    noting_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tune.run(parse("--checkpoint", "mine", "--rows", "8", "64"))
    arguments, config = json.loads(noting_python.read_text())
    assert arguments[3:] == ["--rows", "8", "64"]
    assert config["checkpoint"] == str(tmp_path / "mine")


@pytest.mark.parametrize("engine", [None, {"checkpoint": 1}, {"checkpoint": "x", "typo": 1}])
def test_faulty_repositories(engine: object, tmp_path: Path) -> None:
    root = repository(tmp_path / "models", engine)
    with pytest.raises(ComposeError, match=r"model\.json: .*engine"):
        tune.run(parse("--model-repository", str(root)))
    with pytest.raises(ComposeError, match="make one with `slipstream compose`"):
        tune.run(parse("--model-repository", str(tmp_path)))


def test_a_name_beside_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ComposeError, match="--name one is of a repository, --checkpoint has none"):
        tune.run(parse("--checkpoint", str(tmp_path), "--name", "one"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("one", "{}", "--name 'one' is no deployment of .* .there are: none"),
        ("ensemble", "{", r"model\.json: "),
        ("ensemble", '{"engine": {"checkpoint": 5}}', r"model\.json: Expected `str`"),
    ],
)
def test_ranks_of_a_repository_that_is_none(
    name: str, content: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "tensorrt_llm" / "1").mkdir(parents=True)
    (tmp_path / "tensorrt_llm" / "config.pbtxt").write_text('backend: "slipstream"\n')
    (tmp_path / "tensorrt_llm" / "1" / "model.json").write_text(content)
    with pytest.raises(ComposeError, match=words):
        rank.config_of(tmp_path, name)


@pytest.mark.parametrize(
    "line", ["--rows 0", "--rows 8 x", "--rows", "--checkpoint a --model-repository b"]
)
def test_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*line.split())
    assert capsys.readouterr().err.count("\n") == 1


def test_of_one_of_several_deployments(noting_python: Path, tmp_path: Path) -> None:
    for name, dtype in (("", "float16"), ("chat_", "bfloat16")):
        folder = tmp_path / f"{name}tensorrt_llm"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text('backend: "slipstream"\n')
        engine = {"engine": {"checkpoint": "here", "dtype": dtype}}
        (folder / "1" / "model.json").write_text(json.dumps(engine))
    with pytest.raises(ComposeError, match="choose one of chat, ensemble by --name"):
        tune.run(parse("--model-repository", str(tmp_path)))
    tune.run(parse("--model-repository", str(tmp_path), "--name", "chat"))
    assert json.loads(noting_python.read_text())[1]["dtype"] == "bfloat16"
