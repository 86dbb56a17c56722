"""How many processes a model has: as many as were asked for, or as the cores are good for."""

import contextlib
import re

import pytest
from fixtures.composing import run, tree
from slipstream_compose import cli
from slipstream_compose.compose import INSTANCES_HELP, ComposeError, compose
from slipstream_contract.tensors import MODELS


def test_the_given_number_of_processes(checkpoint, tmp_path):
    run(checkpoint, tmp_path)
    before = tree(tmp_path)
    options = ["--instances", "postprocessing=4", "--instances", "vllm_model=3"]
    run(checkpoint, tmp_path, *options)
    after = tree(tmp_path)
    assert {path for path in before if before[path] != after[path]} == {
        "postprocessing/config.pbtxt",
        "vllm_model/config.pbtxt",
    }
    assert b"{ count: 4 kind: KIND_CPU }" in after["postprocessing/config.pbtxt"]
    assert b"{ count: 3 kind: KIND_MODEL }" in after["vllm_model/config.pbtxt"]
    assert run(checkpoint, tmp_path, *options, "--check") == 0
    assert run(checkpoint, tmp_path, "--check") == 1


@pytest.mark.parametrize(
    ("cores", "post", "text"),
    [(1, 2, 1), (2, 2, 1), (3, 2, 2), (11, 2, 2), (12, 3, 2), (64, 3, 2)],
)
def test_as_many_processes_as_the_cores_are_good_for(
    checkpoint, bare, tmp_path, monkeypatch, cores, post, text
):
    def num_processes(name):
        return int(re.search(rb"count: (\d+) kind", tree(tmp_path)[f"{name}/config.pbtxt"])[1])

    monkeypatch.setattr(cli, "num_cores", lambda: cores)
    run(checkpoint, tmp_path)
    assert num_processes("postprocessing") == post
    assert num_processes("preprocessing") == 2
    assert num_processes("tensorrt_llm_bls") == num_processes("vllm_model") == text
    assert b"count" not in tree(tmp_path)["ensemble/config.pbtxt"]
    run(checkpoint, tmp_path, "--instances", "postprocessing=1", "--instances", "vllm_model=4")
    assert num_processes("postprocessing") == 1
    assert num_processes("vllm_model") == 4
    run(checkpoint, tmp_path, "--wiring", "fused")
    assert num_processes("ensemble") == text
    run(bare, tmp_path / "bare")
    assert "postprocessing/config.pbtxt" not in tree(tmp_path / "bare")


MANY = "preprocessing, postprocessing, tensorrt_llm_bls, vllm_model"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("tensorrt_llm=2", f"--instances names 'tensorrt_llm', which is not one of {MANY}"),
        ("ensemble=3", f"--instances names 'ensemble', which is not one of {MANY}"),
        ("=3", f"--instances names '', which is not one of {MANY}"),
        ("postprocessing=0", "--instances postprocessing is 0, not from 1 to 8"),
        ("postprocessing=9", "--instances postprocessing is 9, not from 1 to 8"),
    ],
)
def test_processes_that_a_model_cannot_have(checkpoint, tmp_path, options, words):
    with pytest.raises(ComposeError) as caught:
        run(checkpoint, tmp_path, "--instances", options)
    assert str(caught.value) == words
    assert not tree(tmp_path)
    if options == "ensemble=3":
        run(checkpoint, tmp_path, "--instances", options, "--wiring", "fused")
        assert b"count: 3" in tree(tmp_path)["ensemble/config.pbtxt"]


@pytest.mark.parametrize("name", MODELS)
def test_help_names_the_models_that_may_have_several_processes(checkpoint, tmp_path, name):
    is_named = name in INSTANCES_HELP.partition("(")[0].replace(",", "").split()
    for wiring in ("composed", "fused"):
        must_work = is_named and (name != "ensemble" or wiring == "fused")
        with contextlib.nullcontext() if must_work else pytest.raises(ComposeError):
            compose(checkpoint, tmp_path, {}, wiring, {name: 3})


def test_processes_of_a_model_that_a_bare_checkpoint_does_not_have(bare, tmp_path):
    with pytest.raises(ComposeError) as caught:
        run(bare, tmp_path, "--instances", "vllm_model=3")
    assert str(caught.value) == "--instances names vllm_model, but the checkpoint has no tokenizer"
    assert not tree(tmp_path)


@pytest.mark.parametrize("value", ["postprocessing", "postprocessing=", "x=-1", "x=1.5", "x=²"])
def test_processes_that_are_no_number(checkpoint, tmp_path, capsys, value):
    with pytest.raises(SystemExit):
        run(checkpoint, tmp_path, "--instances", value)
    assert f"'{value}' is not MODEL=N" in capsys.readouterr().err
