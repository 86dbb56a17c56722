"""Adapters as TensorRT-LLM's arrays: the same terms there and back, and what has no place there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import make_model, save
from fixtures.models.fused_adapters import (
    PARAMETERS,
    SMALL,
    draw_parameters,
    write_parameters,
)
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.adapters.legacy import read_task
from slipstream.models.adapters.read import AdapterWeights, read_adapter
from slipstream_client.cli import main
from slipstream_contract.lora import LoraTask
from slipstream_convert import adapters as convert

RANKS = {"q_proj": 4, "v_proj": 2, "o_proj": 4, "gate_proj": 3, "up_proj": 4, "down_proj": 8}


@pytest.fixture(scope="module", params=["llama", "phi3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(request.param), tmp_path_factory.mktemp(request.param))


def adapter(folder: Path, **config: object) -> Path:
    """Write an adapter whose modules differ in rank and scaling, in numbers that fp16 has."""
    model = make_model("llama")
    pairs = {}
    for seed, (target, rank) in enumerate(RANKS.items()):
        pairs |= draw_pairs(model, [target], rank, seed)
    pairs = {name: tuple(x.half().float() for x in pair) for name, pair in pairs.items()}
    pattern = {name: rank for name, rank in RANKS.items() if rank != 4}
    alphas = {"o_proj": 2, "v_proj": 16}
    return write_adapter(folder, pairs, 4, rank_pattern=pattern, alpha_pattern=alphas, **config)


def check_same(first: AdapterWeights, second: AdapterWeights) -> None:
    assert first.terms.keys() == second.terms.keys()
    for place, terms in first.terms.items():
        for one, other in zip(terms, second.terms[place], strict=True):
            assert one.first == other.first
            torch.testing.assert_close(
                one.b @ one.a, other.b @ other.a, rtol=1e-3, atol=1e-3
            )  # B in fp16


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_arrays_and_directories_say_the_same(checkpoint: Path, tmp_path: Path) -> None:
    source, arrays, again = adapter(tmp_path / "peft"), tmp_path / "arrays", tmp_path / "again"
    where = ["--checkpoint", str(checkpoint)]
    assert main(["adapter", "convert", str(source), str(arrays), *where]) == 0
    weights, config = (np.load(arrays / name) for name in (convert.WEIGHTS, convert.CONFIG))
    assert weights.dtype == np.float16
    assert config.dtype == np.int32
    assert weights.shape[:2] == config.shape[:2] == (1, 12)  # two layers
    rows = LoraTask(1, *weights[0].shape, weights.tobytes(), config.tobytes())
    targets = convert.targets_of(checkpoint)
    original = read_adapter(source, targets, torch.float32)
    check_same(original, read_task(rows, targets, torch.float32))
    assert main(["adapter", "convert", str(arrays), str(again), *where]) == 0
    check_same(original, read_adapter(again, targets, torch.float32))
    with pytest.raises(ConfigError, match="is there already, and not empty"):
        convert.convert(source, again, checkpoint)


def test_modules_that_the_arrays_do_not_have_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Phi 3 joins its matrices, so no module has a place; Llama's head has none."""
    family = json.loads((checkpoint / "config.json").read_text())["model_type"]
    model = make_model(family)
    targets = targets_of(model) if family == "phi3" else ["lm_head"]
    pairs = draw_pairs(model, targets, 2)
    if family != "phi3":
        head = model.lm_head.weight
        pairs = {"lm_head": (torch.randn(2, head.shape[1]), torch.randn(len(head), 2))}
    source = write_adapter(tmp_path / "peft", pairs, 2)
    with pytest.raises(CheckpointError, match=r"the arrays have terms of q, k, v, o"):
        convert.convert(source, tmp_path / "arrays", checkpoint)
    assert not (tmp_path / "arrays").exists()


def test_parameters_of_experts_are_refused(tmp_path: Path) -> None:
    model = make_model("mixtral", **SMALL["mixtral"])
    sides = draw_parameters(model, PARAMETERS, 2)
    source = write_parameters(tmp_path / "peft", sides, {}, 2)
    with pytest.raises(CheckpointError, match="the arrays have no place for target_parameters"):
        convert.convert(source, tmp_path / "arrays", save(model, tmp_path / "base"))


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, c: (w[:, :, :-9], c), r"A and B have \d+ numbers"),
        (lambda w, c: (w, c + np.int32([18, 0, 0])), r"modules are 0, 1"),
        (lambda w, c: (w, c + np.int32([0, 99, 0])), "the model has no such matrix"),
        (lambda w, c: (w, c[:, 1:]), r"not \[rows, numbers\] and \[rows, 3\]"),
        (lambda w, c: (w.astype(object), c), "allow_pickle"),
    ],
)
def test_malformed_arrays_are_refused(checkpoint, tmp_path, change, message) -> None:
    arrays = tmp_path / "arrays"
    convert.convert(adapter(tmp_path / "peft"), arrays, checkpoint)
    paths = [arrays / name for name in (convert.WEIGHTS, convert.CONFIG)]
    for path, array in zip(paths, change(*map(np.load, paths)), strict=True):
        np.save(path, array, allow_pickle=True)
    with pytest.raises(CheckpointError, match=message):
        convert.convert(arrays, tmp_path / "again", checkpoint)
