"""Mixtures whose experts a GPU keeps in 4 and 8 bits: what they stand for, by the oracles."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_runner, random_prompts
from fixtures.models.experts_of_gpu import keep_as_on_hopper
from fixtures.models.rearranged import REARRANGED, plain, quantise
from slipstream.kernels.experts.grouped import ExpertMatrix
from slipstream.layers.experts import Experts
from slipstream.runner.model_runner import ModelRunner

OWN = REARRANGED["mixtral, awq"][2]
CASES = {  # family, case of its matrices: how a GPU keeps them
    ("mixtral", "awq-gemm-32"): "4 bits by 32, packed",
    ("olmoe", "modelopt-int4"): "4 bits by 32, packed",
    ("qwen3_moe", "modelopt-int8"): "8 bits by a row, packed",
    ("olmoe", "bnb-int8"): "8 bits by a row, packed",
    ("mixtral", "modelopt-nvfp4"): "e2m1 by 16, packed",
    ("qwen3_moe", "modelopt-mxfp4"): "e2m1 by 32, packed",
    (
        "mixtral",
        "gptq-v1-4-32",
    ): "dequantised",  # inputs of each expert have an order of their own
}


def experts_of(runner: ModelRunner) -> list[Experts]:
    """The experts of each layer."""
    found = [block.mlp for block in runner._model.blocks]
    assert all(isinstance(each, Experts) for each in found)
    return found


def kept(matrix: ExpertMatrix) -> str:
    """How weights are kept."""
    groups = matrix.groups
    return "dequantised" if groups is None or groups.packing.bits == 32 else str(groups.packing)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_a_gpu_keeps_experts(
    family: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number is the checkpoint's, and logits are those of its weights in 32 bits."""
    own = {**OWN, "num_experts_per_tok": 2, "num_local_experts": 2, "num_experts": 2}
    logits, layers, form = [], [], CASES[family, case]
    for keeps in (True, False):
        directory = tmp_path / f"{keeps}"
        plain(family, own, directory)
        assert quantise(family, case, directory, keeps) > 4
        with monkeypatch.context() as patch:
            if keeps:
                keep_as_on_hopper(patch)
            runner = make_runner(directory)
        generation = Generation(random_prompts([20], 100)[0], 2)
        Driver(runner, keep_logits=True).finish([generation], 11)
        logits.append(torch.stack(generation.logits))
        layers.append(experts_of(runner))
    for packed, dense in zip(*layers, strict=True):
        for ours, plain_one in ((packed.gate_up, dense.gate_up), (packed.down, dense.down)):
            assert kept(ours) == form
            for expert in range(2):
                found, expected = ours.of(expert)[0], plain_one.of(expert)[0]
                torch.testing.assert_close(found, expected, rtol=2**-23, atol=0.0)
    error = float((logits[0] - logits[1]).norm() / logits[1].norm())
    assert error < 1e-4
