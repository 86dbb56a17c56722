"""Several deployments in one repository: each `compose --name` touches its own models alone."""

import json

import pytest
from fixtures.composing import run, settings, tree
from slipstream_compose.compose import ComposeError
from slipstream_contract.deployment import deployments_of
from slipstream_contract.tensors import MODELS

NAMED = {"chat" if name == "ensemble" else f"chat_{name}" for name in MODELS}


def folders(root) -> set[str]:
    return {path.parent.name for path in root.glob("*/config.pbtxt")}


def test_models_are_called_by_the_name(checkpoint, tmp_path):
    assert run(checkpoint, tmp_path, "--name", "chat") == 0
    assert folders(tmp_path) == NAMED
    engine = settings(tmp_path, "chat_tensorrt_llm")["engine"]
    assert engine == {"checkpoint": str(checkpoint), "model": "chat"}
    for name in NAMED - {"chat_tensorrt_llm"}:
        assert settings(tmp_path, name)["engine_of"] == "chat_tensorrt_llm"
    text = (tmp_path / "chat" / "config.pbtxt").read_text()
    assert 'name: "chat"\n' in text
    steps = [line.split('"')[1] for line in text.splitlines() if "model_name" in line]
    assert steps == ["chat_preprocessing", "chat_tensorrt_llm", "chat_postprocessing"]
    for name in NAMED:
        assert f'name: "{name}"\n' in (tmp_path / name / "config.pbtxt").read_text()


def test_but_for_the_name_a_deployment_is_like_any_other(checkpoint, tmp_path):
    run(checkpoint, tmp_path / "plain", "--model-name", "chat")
    run(checkpoint, tmp_path / "named", "--name", "chat")
    plain, named = tree(tmp_path / "plain"), tree(tmp_path / "named")
    for name in MODELS:
        new = "chat" if name == "ensemble" else f"chat_{name}"
        assert (
            plain[f"{name}/config.pbtxt"]
            .replace(f'name: "{name}"'.encode(), f'name: "{new}"'.encode())
            .replace(b'model_name: "', b'model_name: "chat_')
            == named[f"{new}/config.pbtxt"]
        )


def test_deployments_do_not_touch_each_other(checkpoint, bare, tmp_path, capsys):
    run(checkpoint, tmp_path)
    run(checkpoint, tmp_path, "--name", "chat", "--memory-share", "0.5")
    run(bare, tmp_path, "--name", "ids")
    before = tree(tmp_path)
    assert folders(tmp_path) == {*MODELS, *NAMED, "ids_tensorrt_llm", "ids_slipstream_health"}
    assert [d.name for d in deployments_of(tmp_path)] == ["chat", "ensemble", "ids"]
    for options in ((), ("--name", "chat", "--memory-share", "0.5")):
        assert run(checkpoint, tmp_path, *options, "--check") == 0
    capsys.readouterr()
    # Without a tokenizer the text models of this deployment go, and only these.
    assert run(bare, tmp_path, "--name", "chat", "--check") == 1
    shown = capsys.readouterr().out
    assert "chat/config.pbtxt: not part of this repository" in shown
    assert all(line.startswith("chat") for line in shown.splitlines())
    run(bare, tmp_path, "--name", "chat")
    assert folders(tmp_path) & NAMED == {"chat_tensorrt_llm", "chat_slipstream_health"}
    after = tree(tmp_path)
    rest = {path: data for path, data in before.items() if not path.startswith("chat")}
    assert {path: data for path, data in after.items() if not path.startswith("chat")} == rest


def test_models_of_others_stay(checkpoint, tmp_path):
    theirs = tmp_path / "theirs" / "config.pbtxt"
    theirs.parent.mkdir()
    theirs.write_text('name: "theirs"\nbackend: "python"\n')
    run(checkpoint, tmp_path, "--name", "chat")
    run(checkpoint, tmp_path)
    assert theirs.read_text() == 'name: "theirs"\nbackend: "python"\n'
    with pytest.raises(ComposeError, match=r"theirs/config\.pbtxt was not written by"):
        run(checkpoint, tmp_path, "--name", "theirs")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a name has at most 100 letters"),
        ("a b", "a name has at most 100"),
        ("../up", "a name has at most 100"),
        ("a" * 101, "a name has at most 100"),
        ("_a", "the first of them a letter or digit"),
        ("tensorrt_llm", "is, or ends like, that of tensorrt_llm"),
        ("chat_vllm_model", "is, or ends like, that of vllm_model"),
        ("llmapi_model", "that of llmapi_model"),
    ],
)
def test_names_that_cannot_be(checkpoint, tmp_path, name, message):
    with pytest.raises(ComposeError, match=message):
        run(checkpoint, tmp_path / "models", "--name", name)
    assert not (tmp_path / "models").exists()


def test_an_added_contract_has_the_name_too(checkpoint, tmp_path):
    run(checkpoint, tmp_path, "--name", "chat", "--contract", "llmapi", "--contract", "llmapi=x")
    added = {"chat_llmapi_model", "chat_x"}
    assert folders(tmp_path) == NAMED | added
    [chat] = deployments_of(tmp_path)
    assert chat.models["llmapi_model"] == "chat_llmapi_model"
    assert set(chat.members) == NAMED | added
    run(checkpoint, tmp_path, "--name", "chat")
    assert folders(tmp_path) == NAMED


def test_no_model_of_another_deployment_is_overwritten(checkpoint, tmp_path):
    run(checkpoint, tmp_path, "--name", "chat", "--contract", "llmapi=x")
    before = tree(tmp_path)
    with pytest.raises(ComposeError, match="chat_x is a model of the deployment chat"):
        run(checkpoint, tmp_path, "--name", "chat_x")
    assert tree(tmp_path) == before


def test_a_checkpoint_inside_the_repository_is_found_from_any_deployment(checkpoint, tmp_path):
    inside = tmp_path / "tensorrt_llm" / "1" / "checkpoint"
    inside.parent.mkdir(parents=True)
    inside.symlink_to(checkpoint)
    run(inside, tmp_path)
    run(inside, tmp_path, "--name", "chat")
    for deployment in deployments_of(tmp_path):
        assert deployment.checkpoint == checkpoint.resolve()
    reference = settings(tmp_path, "chat_tensorrt_llm")["engine"]["checkpoint"]
    assert reference == "../../tensorrt_llm/1/checkpoint"
    text = (tmp_path / "chat_preprocessing" / "config.pbtxt").read_text()
    assert 'string_value: "../../tensorrt_llm/1/checkpoint"' in text


def test_shares_above_one_are_refused_with_each_of_them(checkpoint, tmp_path):
    run(checkpoint, tmp_path, "--name", "chat", "--memory-share", "0.7")
    before = tree(tmp_path)
    with pytest.raises(ComposeError, match=r"chat 0.7, code 0.5 are 1.2 in all"):
        run(checkpoint, tmp_path, "--name", "code", "--memory-share", "0.5")
    assert tree(tmp_path) == before
    run(checkpoint, tmp_path, "--name", "chat", "--memory-share", "0.9")  # its own does not count
    path = tmp_path / "chat_tensorrt_llm" / "1" / "model.json"
    assert json.loads(path.read_bytes())["engine"]["memory_share"] == 0.9
