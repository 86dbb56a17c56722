"""Matrices whose inputs the size of groups does not divide: the last group is shorter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    rewrite,
    save,
)
from fixtures.tiers import quick_of
from slipstream.fuse.rewrite import places
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packing import dense
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.models.decoder import build
from slipstream.models.formats.module import num_words
from slipstream.models.hf import read_config
from slipstream.models.source import Weights
from slipstream.models.weights import FileSource

HOST = torch.device("cpu")
N, K, GROUP = 128, 160, 64  # of down_proj: two groups of 64, one of 32
Tensors = dict[str, torch.Tensor]


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows of codes into words, the lowest bits first."""
    out = []
    for row in codes.tolist():
        stream = sum(code << bits * i for i, code in enumerate(row))
        each = [stream >> 32 * i & 0xFFFFFFFF for i in range(num_words(len(row), bits))]
        out.append([word - 2**32 if word >= 2**31 else word for word in each])
    return torch.tensor(out, dtype=torch.int32)


def gptq(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int) -> Tensors:
    """As GPTQModel packs: ceil(K / group) groups, `g_idx` of k // group."""
    return {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words(zeros.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(K) // GROUP).int(),
    }


def packed(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int) -> Tensors:
    """As compressed-tensors packs, which warns of such sizes and rounds up, too."""
    return {
        "weight_packed": words(codes, bits),
        "weight_zero_point": words(zeros.T, bits).T.contiguous(),
        "weight_scale": scales,
        "weight_shape": torch.tensor([N, K]),
    }


def config_of(kind: str, bits: int) -> dict[str, Any]:
    if kind == "gptq":
        own = {"bits": bits, "group_size": GROUP, "desc_act": False}
        own["dynamic"] = {"-:.*(q|k|v|o|gate|up)_proj": {}}
        return {"quant_method": "gptq", "checkpoint_format": "gptq_v2"} | own
    weights = {"num_bits": bits, "symmetric": False, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["re:.*down_proj"], "weights": weights | {"type": "int"}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


CASES = {f"{kind}, {bits} bits": (kind, bits) for kind in ("gptq", "packed") for bits in (3, 4, 8)}


@pytest.mark.parametrize("case", quick_of(CASES, {"gptq, 4 bits", "packed, 8 bits"}))
def test_a_last_group_may_be_shorter(case: str, tmp_path: Path) -> None:
    """Logits are those of the weights in fp32, and a GPU keeps what they stand for."""
    kind, bits = CASES[case]
    sizes = {"hidden_size": N, "intermediate_size": K, "num_attention_heads": 2, "head_dim": 64}
    model = make_model("llama", num_key_value_heads=2, num_hidden_layers=2, **sizes)
    directory, stored = save(model, tmp_path / "model"), {}
    for i, layer in enumerate(model.model.layers):
        generator = torch.Generator().manual_seed(i)
        codes, zeros = (
            torch.randint(0, 2**bits, (N, columns), generator=generator) for columns in (K, 3)
        )
        scales = (torch.rand(N, 3, generator=generator) + 0.5).half() * 2.0 ** -(bits + 2)
        spread = torch.arange(K) // GROUP
        weights = (codes - zeros[:, spread]) * scales.float()[:, spread]
        layer.mlp.down_proj.weight.data = weights
        made = (gptq if kind == "gptq" else packed)(codes, zeros, scales, bits)
        stored |= {f"model.layers.{i}.mlp.down_proj.{part}": each for part, each in made.items()}

    def change(tensors: Tensors) -> None:
        for i in range(2):
            del tensors[f"model.layers.{i}.mlp.down_proj.weight"]
        tensors |= stored

    rewrite(directory, change)
    edit_config(directory, quantization_config=config_of(kind, bits))
    generation = Generation(random_prompts([30], 250)[0], 2)
    Driver(make_runner(directory), keep_logits=True).finish([generation], 13)
    with torch.no_grad():
        truth = model(torch.tensor([generation.tokens])).logits[0]
    for i, logits in enumerate(generation.logits):
        wanted = truth[len(generation.prompt) - 1 + i]
        assert (logits - wanted).abs().max() <= 2e-4 * wanted.abs().max()
    config = read_config(directory)
    weights = Weights(
        FileSource(directory, HOST, config.tensors), HOST, torch.bfloat16, target=KNOWN["sm_90a"]
    )
    found = list(places(build(config, weights, max_model_len=8)))
    down = [place.linear.weights for name, place in found if name.endswith("down")]
    assert len(down) == 2
    for matrix, layer in zip(down, model.model.layers, strict=True):
        assert isinstance(matrix, Matrix)
        assert matrix.groups is not None
        assert torch.equal(dense(matrix.values, matrix.groups), layer.mlp.down_proj.weight.data)
