"""Checkpoints to compose from."""

import os
from pathlib import Path

import pytest
from fixtures.models.checkpoints import make_model
from fixtures.models.checkpoints import save as save_model
from fixtures.stages.zoo import byte_level_bpe
from fixtures.stages.zoo import save as save_tokenizer


@pytest.fixture(scope="package")
def bare(tmp_path_factory) -> Path:
    """A checkpoint without a tokenizer."""
    model = make_model(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=320)
    return save_model(model, tmp_path_factory.mktemp("bare") / "a-model")


@pytest.fixture(scope="package")
def checkpoint(bare, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "a-model"
    folder.mkdir()
    for path in bare.iterdir():
        os.link(path, folder / path.name)
    save_tokenizer(byte_level_bpe(), folder)
    return folder
