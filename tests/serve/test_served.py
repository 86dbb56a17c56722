"""What `--load` means, and whose repair is counted where."""

import json
from pathlib import Path

import pytest
from slipstream_runtime import repairs
from slipstream_serve.pulse import contract_of
from slipstream_serve.served import RepairCounts, chosen, num_instances
from slipstream_serve.triton import Endpoints, ServeError, TritonServer


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    for prefix in ("", "chat_"):
        engine = {"engine": {"checkpoint": "/m"}}
        write(root, f"{prefix}tensorrt_llm", engine)
        write(root, f"{prefix}vllm_model", {"engine_of": f"{prefix}tensorrt_llm"})
    write(root, "chat", {"engine_of": "chat_tensorrt_llm"})
    write(root, "chat_own", {"engine_of": "chat_tensorrt_llm", "wiring": "llmapi"})
    write(root, "theirs_preprocessing", None)
    return root


def write(root: Path, model: str, settings: object) -> None:
    (root / model / "1").mkdir(parents=True)
    (root / model / "config.pbtxt").write_text(f'name: "{model}"\n')
    if settings is not None:
        (root / model / "1" / "model.json").write_text(json.dumps(settings))


CHAT = ["chat", "chat_own", "chat_tensorrt_llm", "chat_vllm_model"]
ALL = [*CHAT, "tensorrt_llm", "theirs_preprocessing", "vllm_model"]


@pytest.mark.parametrize(
    ("names", "models"),
    [
        ([], []),
        (["*"], ALL),
        (["chat"], CHAT),
        (["ensemble"], ["tensorrt_llm", "vllm_model"]),
        (["theirs_preprocessing", "chat_own", "chat_own"], ["theirs_preprocessing", "chat_own"]),
        (["chat_own", "chat"], ["chat_own", "chat", "chat_tensorrt_llm", "chat_vllm_model"]),
    ],
)
def test_names_of_deployments_and_of_models(repository, names, models):
    assert chosen(repository, ALL, names) == models


def test_a_name_of_nothing_is_refused_with_those_that_are_there(repository):
    with pytest.raises(ServeError, match=r"--load code: .* has no such model; it has chat, ensemb"):
        chosen(repository, ALL, ["code"])


def test_models_of_others_are_not_probed_as_ours(repository):
    assert contract_of(repository, "theirs_preprocessing") == "theirs_preprocessing"
    assert contract_of(repository, "chat_own") == "llmapi_model"
    assert contract_of(repository, "chat_vllm_model") == "vllm_model"
    assert contract_of(repository, "chat") == "ensemble"


def test_repairs_are_counted_with_the_engine_of_the_model(repository, tmp_path):
    server = TritonServer(repository, Endpoints.free(), tmp_path / "log", is_supervised=True)
    try:
        for folder in ("", "engine-chat"):
            server.runtime.of(folder).home.mkdir(exist_ok=True)
        counts = RepairCounts(server)
        for model in ("chat", "chat_vllm_model", "vllm_model", "theirs_preprocessing", None):
            counts.note(model)
        found = {
            name: repairs.read(server.runtime.of(name).repairs) for name in ("", "engine-chat")
        }
        assert found == {"": {"model": 2, "server": 1}, "engine-chat": {"model": 2, "server": 1}}
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("config", "number"),
    [
        ("instance_group [\n  { count: 2 kind: KIND_CPU }\n]\n", 2),
        ("instance_group [{ count: 1 }, { count: 3 }]", 4),
        ("instance_group [ { kind: KIND_CPU } ]", 0),
        ("", 0),
    ],
)
def test_processes_that_a_model_asks_for(tmp_path, config, number):
    (tmp_path / "config.pbtxt").write_text(config)
    assert num_instances(tmp_path) == number
    assert num_instances(tmp_path / "nowhere") == 0
