"""`compose --contract`: NVIDIA's LLM-API model beside the others, or in the place of the oldest."""

import argparse
import json
from pathlib import Path

import pytest
from slipstream_compose import cli
from slipstream_compose.compose import ComposeError
from slipstream_contract.tensors import LLMAPI, MODELS

CHECKPOINT = Path(__file__).resolve().parents[2] / "model_repository/tensorrt_llm/1/checkpoint"
OLDER = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}


def run(output: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    paths = ["--checkpoint", str(CHECKPOINT), "--output", str(output)]
    return cli.run(parser.parse_args(["compose", *paths, *options]))


def settings(output: Path) -> dict[str, dict]:
    return {path.parts[-3]: json.loads(path.read_bytes()) for path in output.glob("*/1/model.json")}


def is_decoupled(output: Path, model: str) -> bool:
    return "decoupled: true" in (output / model / "config.pbtxt").read_text()


def test_the_model_stands_beside_all_others(tmp_path: Path) -> None:
    assert run(tmp_path, "--contract", "llmapi") == 0
    found = settings(tmp_path)
    assert found.keys() == MODELS.keys() | {LLMAPI.name}
    assert found[LLMAPI.name] == {"wiring": "llmapi", "engine_of": "tensorrt_llm"}
    assert not is_decoupled(tmp_path, LLMAPI.name)


def test_with_nvidias_own_name_it_has_the_engine_and_the_older_models_go(tmp_path: Path) -> None:
    run(tmp_path)
    names = ("--contract", "llmapi=tensorrt_llm,decoupled", "--contract", "llmapi=second")
    assert run(tmp_path, *names) == 0
    found = settings(tmp_path)
    assert found.keys() == (MODELS.keys() - OLDER) | {"tensorrt_llm", "second"}
    assert found["tensorrt_llm"]["wiring"] == "llmapi"
    assert found["tensorrt_llm"]["engine"]["checkpoint"] == str(CHECKPOINT)
    assert found["second"] == found["vllm_model"] | {"wiring": "llmapi"}
    assert is_decoupled(tmp_path, "tensorrt_llm")
    assert not is_decoupled(tmp_path, "second")
    assert run(tmp_path, *names, "--check") == 0


def test_a_model_that_is_no_longer_asked_for_is_removed(tmp_path: Path, capsys) -> None:
    run(tmp_path, "--contract", "llmapi=mine")
    assert run(tmp_path, "--check") == 1
    assert "mine/config.pbtxt: not part of this repository" in capsys.readouterr().out
    run(tmp_path)
    assert settings(tmp_path).keys() == MODELS.keys()
    assert not (tmp_path / "mine").exists()


def test_models_of_others_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "theirs" / "config.pbtxt"
    other.parent.mkdir()
    other.write_text('name: "theirs"\n')
    run(tmp_path, "--contract", "llmapi")
    run(tmp_path)
    assert other.read_text() == 'name: "theirs"\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contract", "openai"], "--contract names 'openai', which is not llmapi"),
        (["--contract", "llmapi,often"], "has 'often', where only decoupled may be"),
        (["--contract", "llmapi=ensemble"], "is to be called 'ensemble'"),
        (["--contract", "llmapi=a/b"], "is to be called 'a/b'"),
        (["--contract", "llmapi="], "is to be called ''"),
        (["--contract", "llmapi", "--contract", "llmapi"], "gives two models the name llmapi"),
        (
            ["--contract", "llmapi=tensorrt_llm", "--instances", "tensorrt_llm_bls=2"],
            "--instances names 'tensorrt_llm_bls', which is not one of vllm_model",
        ),
        (
            ["--contract", "llmapi", "--instances", "llmapi_model=2"],
            "--instances names 'llmapi_model', which is not one of",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ComposeError, match=message):
        run(tmp_path, *options)
