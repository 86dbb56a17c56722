"""Whole models that ModelOpt's own `export_hf_checkpoint` wrote, with its new and old files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_runner
from fixtures.models.rows_of_gpu import round_rows_as_on_gpu
from safetensors import safe_open
from safetensors.torch import save_file
from slipstream.errors import StartError
from slipstream.models.axes import TensorNames
from slipstream.models.cuts import Cuts
from slipstream.models.weights import FileSource
from slipstream.quant.matrix import Kind, dequantise
from slipstream.quant.row_forms import Factored

FILE = Path(__file__).parents[1] / "fixtures" / "quant" / "modelopt.safetensors"
HOST, DOWN = torch.device("cpu"), "model.layers.0.mlp.down_proj"
IDS = (torch.arange(4 * 24).view(4, 24) * 7 % 64).tolist()
# Format -> kind, inputs of a group of `down_proj`, and how far its weights and the model's logits
# may be from those of 16 bits, in parts of these (root mean squares).
FORMATS = {
    "FP8_DEFAULT_CFG": (Kind.F8, 256, 0.03, 0.12),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": (Kind.F8, 256, 0.03, 0.12),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": (Kind.F8, 128, 0.03, 0.12),
    "INT8_SMOOTHQUANT_CFG": (Kind.W8, 256, 0.02, 0.04),
    "INT8_WEIGHT_ONLY_CFG": (Kind.W8, 256, 0.01, 0.04),
    "INT4_AWQ_CFG": (Kind.W4, 32, 0.12, 0.45),
    "W4A8_AWQ_BETA_CFG": (Kind.W4, 64, 0.12, 0.45),
    "NVFP4_DEFAULT_CFG": (Kind.F4, 16, 0.12, 0.45),
    "W4A16_NVFP4_CFG": (Kind.F4, 16, 0.12, 0.45),
    "W4A8_NVFP4_FP8_CFG": (Kind.F4, 32, 0.12, 0.45),
    "MXFP4_DEFAULT_CFG": (Kind.F4, 32, 0.14, 0.45),
    "W4A8_MXFP4_FP8_CFG": (Kind.F4, 32, 0.14, 0.45),
}

ROWS = {  # to what they are rounded
    "FP8_DEFAULT_CFG": "e4m3",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "e4m3",
    "INT8_SMOOTHQUANT_CFG": "int8",
    "W4A8_AWQ_BETA_CFG": "e4m3",
}


def unpacked(name: str, directory: Path) -> Path:
    """Write the files of an export; `fixtures/quant/write_modelopt.py` re-makes them."""
    directory.mkdir(exist_ok=True)
    with safe_open(FILE, "pt") as file:
        start = f"{name}/"
        names = [each for each in file.keys() if each.startswith(start)]  # noqa: SIM118
        tensors = {each.removeprefix(start): file.get_tensor(each) for each in names}
        for each in ("config.json", "hf_quant_config.json"):
            (directory / each).write_text(file.metadata()[start + each])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def configured(directory: Path, **changes: Any) -> None:
    """Change what config.json says of weights; None: nothing is said there."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    own = config.pop("quantization_config")
    if changes:
        config["quantization_config"] = own | changes
    path.write_text(json.dumps(config))


def logits(directory: Path) -> torch.Tensor:
    """Return those behind each prompt."""
    generations = [Generation(prompt, 1) for prompt in IDS]
    Driver(make_runner(directory, kv_cache_tokens=256), keep_logits=True).finish(generations)
    return torch.stack([each.logits[0] for each in generations])


def error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_is_served(name: str, tmp_path: Path) -> None:
    """By its new configuration, and by hf_quant_config.json alone: the same logits."""
    kind, group, most, most_of_logits = FORMATS[name]
    directory = unpacked(name, tmp_path)
    down = FileSource(directory, HOST, TensorNames()).quantized(DOWN, 64, 256)
    assert down is not None
    assert (down.kind, down.group, down.row_type) == (kind, group, ROWS.get(name, ""))
    with safe_open(FILE, "pt") as file:
        weights, plain = file.get_tensor("down_proj").float(), file.get_tensor("logits")
    found = logits(directory)
    assert error(dequantise(down), weights) <= most
    assert error(found, plain) <= most_of_logits
    configured(directory)
    assert torch.equal(logits(directory), found)


def test_rows_in_int8_are_rounded_behind_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has them: logits are no further from 16 bits, and others than with rows as is."""
    directory = unpacked("INT8_SMOOTHQUANT_CFG", tmp_path)
    with safe_open(FILE, "pt") as file:
        plain = file.get_tensor("logits")
    as_is = logits(directory)
    round_rows_as_on_gpu(monkeypatch)
    block = make_runner(directory)._model.blocks[0]
    for linear in (block.attention.qkv.linear, block.mlp.down.linear):
        assert isinstance(linear.weights, Factored)
        x = torch.randn(3, linear.weights.matrix.values.shape[1], dtype=torch.float64)
        rows = x.float().double() * linear.weights.factors
        unit = rows.abs().amax(1, keepdim=True) / 127
        matrix = linear.weights.matrix.values * linear.weights.matrix.scales[:, None].double()
        wanted = (rows / unit).round() * unit @ matrix.T
        torch.testing.assert_close(linear(x.float()).double(), wanted, rtol=1e-5, atol=1e-6)
    found = logits(directory)
    assert 0.001 < error(found, as_is) < 0.04
    assert error(found, plain) <= FORMATS["INT8_SMOOTHQUANT_CFG"][3]


@pytest.mark.parametrize("name", ["INT4_AWQ_CFG", "W4A8_NVFP4_FP8_CFG"])
def test_a_size_of_groups_that_is_said_is_checked(name: str, tmp_path: Path) -> None:
    directory = unpacked(name, tmp_path)
    configured(directory, group_size=16)
    with pytest.raises(
        StartError, match=r"hf_quant_config.*group_size = .* contradicts .* = 16 in"
    ):
        make_runner(directory)
    (directory / "hf_quant_config.json").unlink()
    with pytest.raises(StartError, match=r"proj\.weight_scale is \["):
        make_runner(directory)


@pytest.mark.parametrize("name", ["INT4_AWQ_CFG", "W4A8_NVFP4_FP8_CFG", "NVFP4_DEFAULT_CFG"])
def test_inputs_of_a_rank_have_its_groups(name: str, tmp_path: Path) -> None:
    """Where nothing says how many inputs a group has, the whole matrix's scales do."""
    directory, found = unpacked(name, tmp_path), []
    for size in (1, 2):
        for rank in range(size):
            cuts = Cuts(rank, size, 2, 1, {"inner": 256}, False) if size > 1 else None
            names = TensorNames(cuts=cuts)
            matrix = FileSource(directory, HOST, names).quantized(DOWN, 64, 256 // size)
            assert matrix is not None
            found.append(dequantise(matrix))
    assert torch.equal(torch.cat(found[1:], 1), found[0])
