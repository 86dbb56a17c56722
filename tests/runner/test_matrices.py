"""The bytes of weights by matrix, before they are read: packed, in e4m3, or dequantised."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import make_model, make_runner, save
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.models.hf import read_config
from slipstream.quant.forms import Packed
from slipstream.runner import plan as planning
from slipstream.runner.matrices import weight_bytes, weights_of

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 2}
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", tie_word_embeddings=True, **SIZES)
    return save(model, tmp_path_factory.mktemp("matrices") / "tiny")


def bytes_on(checkpoint: Path, target: str, scheme: str, **options: str) -> int:
    config = EngineConfig(checkpoint=str(checkpoint), quantization=scheme, **options)
    return weight_bytes(config, read_config(checkpoint), BF16, KNOWN[target])


def test_bytes_of_a_weight(checkpoint: Path) -> None:
    """Of a GPU and of a CPU; what is not a block's matrix has 16 bits in all of them."""
    config = EngineConfig(checkpoint=str(checkpoint))
    found = weights_of(config, read_config(checkpoint), BF16, KNOWN["sm_90a"])
    blocks = [weight for weight in found if weight.name != "head"]
    count = sum(weight.outputs * weight.inputs * weight.count for weight in blocks)
    outputs = sum(weight.outputs * weight.count for weight in blocks)
    plain = bytes_on(checkpoint, "sm_90a", "none")
    rest = plain - 2 * count
    assert 2 * 512 * 256 < rest < 2 * 512 * 256 + 8192  # tied, then norms and angles
    packed4 = rest + count // 2 + count // 64 * (2 + 1)  # a scale and a zero of a group
    for target in ("sm_80", "sm_90a"):
        assert bytes_on(checkpoint, target, "int4") == packed4
        assert bytes_on(checkpoint, target, "int8") == rest + count + 2 * outputs
        assert bytes_on(checkpoint, target, "int4", load_format="random") == packed4
    for target in ("sm_80", "sm_90a"):  # for rows of 16 bits, and of e4m3
        assert bytes_on(checkpoint, target, "w4a8") == rest + count // 2 + count // 128 * 2
    assert bytes_on(checkpoint, "sm_90a", "fp8") == rest + count + 4 * outputs
    assert bytes_on(checkpoint, "cpu", "int4") == plain  # its zeros have no GEMM there


@pytest.mark.parametrize("scheme", ["none", "fp8", "int4", "int8"])
def test_what_is_counted_is_what_is_kept(checkpoint: Path, scheme: str) -> None:
    runner = make_runner(checkpoint, dtype="bfloat16", quantization=scheme)
    kept = 0
    for block in runner._model.blocks:
        attention, mlp = block.attention, block.mlp
        for place in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
            weights = place.linear.weights
            assert isinstance(weights, Matrix | Packed)
            kept += sum(each.nbytes for each in weights if isinstance(each, torch.Tensor))
    counted = bytes_on(checkpoint, "cpu", scheme)
    assert 2 * 512 * 256 < counted - kept < 2 * 512 * 256 + 8192


def test_a_share_that_packed_weights_fit_in_is_not_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "target_of", lambda device: KNOWN["sm_90a"])
    options = {"checkpoint": str(checkpoint), "dtype": "bfloat16", "memory_share": 0.5}
    config = EngineConfig(**options, max_model_len=32)
    plan = planning.settle(config, CUDA)
    cache = plan.held_blocks * plan.block_bytes
    total = 2 * (plan.weight_bytes + cache) - 2  # a byte of the half is missing
    monkeypatch.setattr(planning, "total_memory", lambda device: total)
    with pytest.raises(ConfigError, match=r"memory_share = 0.5 .* the weights need 0.00 GB"):
        planning._check_share(plan)
    packed = EngineConfig(**options, max_model_len=32, quantization="int4")
    planning._check_share(planning.settle(packed, CUDA))
