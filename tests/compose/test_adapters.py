"""Adapters of a repository: `compose` refuses, by name, what the engine's start would."""

from pathlib import Path

import pytest
import torch
from fixtures.composing import run, settings
from fixtures.models.adapters import Pairs, write_adapter
from safetensors.torch import load_file, save_file
from slipstream.errors import ConfigError

_RANK = 4
_QUERY = "model.layers.0.self_attn.q_proj"


def pairs(module: str = _QUERY, width: int = 64) -> Pairs:
    return {module: (torch.ones(_RANK, width), torch.ones(256, _RANK))}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "sql", pairs(), _RANK, target_modules=["q_proj"])


def test_adapters_are_in_the_settings(checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    assert run(checkpoint, tmp_path / "out", "--adapters", f"sql={adapter},b={adapter}") == 0
    assert settings(tmp_path / "out")["engine"]["adapters"] == f"sql={adapter},b={adapter}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sql=/nowhere/at/all", "adapters: sql: /nowhere/at/all: no such directory"),
        ("/nowhere/at/all", "adapters has '/nowhere/at/all', not NAME=DIR"),
        ("sql={adapter},sql={adapter}", "adapters has 'sql' twice"),
        ("a-model={adapter}", "the adapter's name is 'a-model', which is the model's"),
    ],
)
def test_adapters_that_no_engine_starts_with_are_refused(
    checkpoint: Path, adapter: Path, tmp_path: Path, given: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run(checkpoint, tmp_path / "out", "--adapters", given.format(adapter=adapter))
    assert str(refused.value) == message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", ["", "--tensor-parallel 2", "--backend-model transformers"])
@pytest.mark.parametrize("module", [_QUERY, "model.layers.7.self_attn.q_proj"])
def test_an_adapter_of_another_model_is_refused(
    checkpoint: Path, tmp_path: Path, module: str, options: str
) -> None:
    wide = write_adapter(tmp_path / "x", pairs(module, 128), _RANK, target_modules=["q_proj"])
    words = r"adapters: x: .*(which give no 256 outputs|is none that adapters change here)"
    if "transformers" in options:
        words = "backend_model = 'transformers' serves no adapters"
    with pytest.raises(ConfigError, match=words):
        run(checkpoint, tmp_path / "out", "--adapters", f"x={wide}", *options.split())


def test_magnitudes_are_left_to_the_start(checkpoint: Path, tmp_path: Path) -> None:
    made = write_adapter(tmp_path / "x", pairs(), _RANK, target_modules=["q_proj"], use_dora=True)
    tensors = made / "adapter_model.safetensors"
    held = load_file(tensors)
    held[f"base_model.model.{_QUERY}.lora_magnitude_vector"] = torch.ones(256)
    save_file(held, tensors)
    assert run(checkpoint, tmp_path / "out", "--adapters", f"x={made}") == 0
