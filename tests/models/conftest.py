"""The model whose adapters are tested, and its runner; a file that wants another has its own."""

import pytest
import torch
from fixtures.models.adapters import SIZES
from fixtures.models.checkpoints import make_model, make_runner, save
from slipstream.runner.model_runner import ModelRunner


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    return make_model("llama", **SIZES)


@pytest.fixture(scope="module")
def runner(base: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save(base, tmp_path_factory.mktemp("base")))
