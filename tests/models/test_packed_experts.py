"""Mixtures whose experts a GPU keeps in 4 and 8 bits: what they stand for, by the oracles."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_runner, random_prompts, rewrite
from fixtures.models.experts_of_gpu import keep_as_on_hopper
from fixtures.models.quantised import Tensors
from fixtures.models.ranks import compare
from fixtures.models.rearranged import REARRANGED, plain, quantise
from slipstream.config import EngineConfig
from slipstream.kernels.experts.grouped import ExpertMatrix
from slipstream.kernels.runtime.registry import CPU, KNOWN
from slipstream.layers.experts import Experts
from slipstream.models.decoder import build
from slipstream.models.hf import read_config
from slipstream.models.source import Weights
from slipstream.models.weights import FileSource
from slipstream.runner.matrices import weight_parts
from slipstream.runner.model_runner import ModelRunner
from torch import Tensor

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
QUICK = {  # of bits, and of what is not packed
    ("mixtral", "awq-gemm-32"),
    ("qwen3_moe", "modelopt-int8"),
    ("qwen3_moe", "modelopt-mxfp4"),
    ("mixtral", "gptq-v1-4-32"),
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


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.rest) for each in CASES],
)
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


def zeros_of_one_are_8(tensors: Tensors) -> None:
    """As of an expert that no row has ever chosen, whose weights are all alike."""
    names = [name for name in tensors if ".experts.0.up_proj.qzeros" in name]
    for name in names:
        tensors[name].fill_(0x88888888 - (1 << 32))
    assert len(names) == 2


@pytest.mark.parametrize(
    "case", ["awq-gemm-32", "awq-gemm-32, one expert", "modelopt-mxfp4", "modelopt-int8"]
)
def test_memory_is_counted_as_a_gpu_keeps_experts(case: str, tmp_path: Path) -> None:
    """Before any weight is read."""
    directory = tmp_path / "model"
    plain("qwen3_moe", OWN, directory)
    quantise("qwen3_moe", case.partition(",")[0], directory)
    if case.endswith("one expert"):
        rewrite(directory, zeros_of_one_are_8)
    config = EngineConfig(checkpoint=str(directory), device="cuda", dtype="bfloat16")
    model, hopper = read_config(directory), KNOWN["sm_90a"]
    counted = weight_parts(config, model, torch.bfloat16, hopper)
    source = FileSource(directory, torch.device("cpu"), model.tensors)
    decoder = build(model, Weights(source, torch.device("cpu"), torch.bfloat16, target=hopper), 8)
    tensors: list[Tensor | None] = []
    for block in decoder.blocks:
        for each in (block.mlp.gate_up, block.mlp.down):
            assert each.groups is not None
            tensors += [each.values, each.scales, each.groups.scales, each.groups.zeros]
    found = sum(each.numel() * each.element_size() for each in tensors if each is not None)
    assert counted.expert_bytes == found
    assert counted.expert_codes is not None
    assert counted.expert_codes[0] == (8 if case == "modelopt-int8" else 4)
    assert found < counted.expert_elements * (1.1 if case == "modelopt-int8" else 0.7)


@pytest.mark.parametrize("case", ["awq-gemm-32", "modelopt-mxfp4"])
def test_memory_is_counted_as_a_cpu_keeps_experts(case: str, tmp_path: Path) -> None:
    """Zeros become minimums, which fp16 has no room for."""
    directory = tmp_path / "model"
    plain("qwen3_moe", OWN, directory)
    quantise("qwen3_moe", case, directory)
    counted = weight_parts(
        EngineConfig(checkpoint=str(directory), device="cpu", dtype="float32"),
        read_config(directory),
        torch.float32,
        CPU,
    )
    layers = [(each.gate_up, each.down) for each in experts_of(make_runner(directory))]
    tensors: list[Tensor | None] = []
    for each in (matrix for layer in layers for matrix in layer):
        assert each.groups is not None
        tensors += [each.values, each.groups.scales, each.groups.minimums]
    found = [each for each in tensors if each is not None]
    assert counted.expert_bytes == sum(each.numel() * each.element_size() for each in found)


@pytest.mark.parametrize(
    ("case", "size", "stages"),
    [
        ("awq-gemm-32", 2, 1),
        pytest.param("modelopt-mxfp4", 2, 1, marks=pytest.mark.rest),
        pytest.param("modelopt-nvfp4", 1, 2, marks=pytest.mark.rest),
    ],
)
def test_ranks_and_stages_have_parts_of_packed_experts(
    case: str, size: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    plain("mixtral", OWN | {"num_key_value_heads": 2}, directory)
    quantise("mixtral", case, directory)
    keep_as_on_hopper(monkeypatch)
    compare(directory, size, 100, stages)
