"""Deployments of a repository: names that can be taken apart, models found by what they say."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.deployment import (
    DEFAULT,
    ENGINE,
    deployments_of,
    engine_model_of,
    folder_of,
    name_of,
    split_name,
)
from slipstream_contract.tensors import LLMAPI, MODELS

ROLES = (*MODELS, LLMAPI.name)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}", fullmatch=True).filter(
    lambda name: name not in ROLES and not name.endswith(tuple(f"_{role}" for role in ROLES))
)


def put(root: Path, model: str, settings: object, backend: str = "slipstream") -> None:
    (root / model / "1").mkdir(parents=True)
    (root / model / "config.pbtxt").write_text(f'name: "{model}"\nbackend: "{backend}"\n')
    if settings is not None:
        text = settings if isinstance(settings, str) else json.dumps(settings)
        (root / model / "1" / "model.json").write_text(text)


@given(NAMES, st.sampled_from(ROLES))
def test_a_name_says_deployment_and_role(name, role):
    assert split_name(name_of(name, role)) == (name, role)
    assert split_name(name_of(DEFAULT, role)) == (DEFAULT, role)


@given(st.lists(NAMES, min_size=2, max_size=2, unique=True))
def test_folders_of_engines_are_short_and_apart(names):
    folders = [folder_of(name_of(name, ENGINE)) for name in names]
    assert folder_of(ENGINE) == ""
    assert all(0 < len(folder) <= 24 and "/" not in folder for folder in folders)
    assert folders[0] != folders[1]


def test_models_of_two_engines_among_others(tmp_path):
    put(tmp_path, "tensorrt_llm", {"engine": {"checkpoint": "checkpoint", "model": "tiny"}})
    put(tmp_path, "ensemble", {})
    put(tmp_path, "preprocessing", {}, "slipstream_preprocessing")
    engine = {"checkpoint": "/models/code-7b", "memory_share": 0.5}
    put(tmp_path, "code_tensorrt_llm", {"engine": engine})
    put(tmp_path, "code", {"engine_of": "code_tensorrt_llm"})
    put(tmp_path, "mine", {"wiring": "llmapi", "engine_of": "code_tensorrt_llm"})
    put(tmp_path, "code_vllm_model", {"wiring": "vllm", "engine_of": "code_tensorrt_llm"})
    put(tmp_path, "theirs", None, "python")
    put(tmp_path, "theirs_too", "{no json", "python")
    code, plain = deployments_of(tmp_path)
    assert (plain.name, plain.public_name, plain.engine_model) == (DEFAULT, "tiny", ENGINE)
    assert plain.checkpoint == tmp_path / "tensorrt_llm" / "1" / "checkpoint"
    assert set(plain.models) == {"tensorrt_llm", "ensemble", "preprocessing"}
    assert (plain.folder, plain.text_model) == ("", "ensemble")
    assert (code.name, code.public_name, code.folder) == ("code", "code-7b", "engine-code")
    assert code.models == {
        "ensemble": "code",
        "tensorrt_llm": "code_tensorrt_llm",
        "vllm_model": "code_vllm_model",
        "llmapi_model": "mine",
    }
    assert code.settings == engine
    assert code.health_model == "code_slipstream_health"
    assert [d.is_called("code") for d in (code, plain)] == [True, False]


def test_a_model_that_says_nothing_belongs_to_the_engine_of_its_name(tmp_path):
    put(tmp_path, "code_postprocessing", None)
    put(tmp_path, "postprocessing", {})
    assert engine_model_of(tmp_path / "code_postprocessing") == ENGINE  # there is no other
    put(tmp_path, "code_tensorrt_llm", {"engine": {"checkpoint": "checkpoint"}})
    assert engine_model_of(tmp_path / "code_postprocessing") == "code_tensorrt_llm"
    assert engine_model_of(tmp_path / "postprocessing") == ENGINE


@pytest.mark.parametrize(
    "text", ["{", "[]", '"a"', "[" * 100_000], ids=["open", "list", "text", "deep"]
)
def test_bad_settings_of_a_model_of_ours_are_no_silent_loss(tmp_path, text):
    put(tmp_path, "code_tensorrt_llm", text)
    with pytest.raises(ValueError, match=r"code_tensorrt_llm/1/model\.json"):
        deployments_of(tmp_path)
