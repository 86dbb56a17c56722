"""Configurations as libraries write them beside quantised weights; a matrix each."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.quantised import (
    NAME,
    K,
    N,
    Tensors,
    config_of,
    directory_of,
    read_matrix,
    tensors_of,
)
from slipstream.errors import CheckpointError
from slipstream.models.axes import TensorNames
from slipstream.models.cache_scheme import says_fp8
from slipstream.models.formats.compressed_tensors import CompressedTensors
from slipstream.models.formats.gptq import Gptq
from slipstream.models.reader import Reader
from slipstream.models.weights import FileSource, ShapeSource
from slipstream.quant.matrix import dequantise

# What transformers 5.23 writes of any GPTQ and AWQ that it saves again.
OF_TRANSFORMERS: dict[str, Any] = {
    "act_group_aware": True,
    "backend": "auto",
    "batch_size": 1,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.1,
    "meta": None,
    "modules_in_block_to_quantize": None,
    "sym": True,
    "true_sequential": True,
}
OF_AUTOROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:gptqmodel",
    "act_bits": 16,
    "autoround_version": "0.14.2",
    "checkpoint_format": None,
    "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
    "model_free": True,
    "to_quant_block_names": ["model.layers"],
}
SPARSITY = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
LAYERS = {"model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16}}
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "AWQ of transformers 5": ("awq-gemm-32", OF_TRANSFORMERS | {"format": "gemm"}),
    "AWQ of GPTQModel": (
        "awq-gemm-32",
        {"version": None, "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32"},
    ),
    "GPTQ of transformers 5": ("gptq-v1-4-32", OF_TRANSFORMERS | {"format": "gptq"}),
    "GPTQ of newer GPTQModel": ("gptq-v1-4-32", {"method": "gptq", "format": "gptq"}),
    "AWQ of newer GPTQModel": ("awq-gemm-32", {"method": "awq", "format": "gemm"}),
    "fp8 as MiniMax-M2 has it": ("hf-fp8-float", {"fmt": "float8_e4m3fn"}),
    "AutoRound, zeros of version 2": ("gptq-v2-4-32", OF_AUTOROUND),
    "AutoRound of 2024": ("gptq-v1-4-32", {"quant_method": "intel/auto-round"}),
    "AutoRound, a layer in other bits": (
        "gptq-v1-4-32",
        {"bits": 8, "extra_config": {".*up_proj": {"bits": 4}, "model.layers.0.mlp": {"bits": 4}}},
    ),
    "bitsandbytes of 2023, 4 bits": ("bnb-nf4", {"quant_method": None}),
    "bitsandbytes of 2023, 8 bits": ("bnb-int8", {"quant_method": None}),
    "llm-compressor, sparsity as found": ("ct-pack-4", {"sparsity_config": SPARSITY}),
    "ModelOpt, blocks of layers": (
        "modelopt-nvfp4",
        {"quant_algo": "MIXED_PRECISION", "group_size": None, "quantized_layers": LAYERS},
    ),
}


def written(folder: Path, case: str, changes: dict[str, Any], more: Tensors | None = None) -> Path:
    """Write the matrix of a case; a key that becomes None is left out."""
    config = config_of(case) | changes
    kept = {key: value for key, value in config.items() if key not in changes or value is not None}
    return directory_of(folder, tensors_of(case)[0] | (more or {}), kept)


@pytest.mark.parametrize("name", READ)
def test_what_libraries_write_is_read(name: str, tmp_path: Path) -> None:
    case, changes = READ[name]
    want = tensors_of(case)[1]
    matrix = read_matrix(written(tmp_path, case, changes))
    torch.testing.assert_close(dequantise(matrix)[::8], want, rtol=1e-6, atol=1e-7)


TURNS = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
PLAIN: dict[str, dict[str, Any]] = {
    "by turns": {"modules_in_block_to_quantize": TURNS},
    "in one list": {"modules_in_block_to_quantize": ["self_attn.q_proj", "mlp.down_proj"]},
    "in 16 bits": {"extra_config": {NAME: {"bits": 16}, ".*": {"bits": 4}}},
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_was_not_quantised_is_taken_as_it_is(name: str, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32} | PLAIN[name]
    directory = directory_of(tmp_path, {"weight": torch.zeros(N, K)}, config)
    assert ShapeSource(directory, TensorNames()).quantized(NAME, N, K) is None
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": config | dict.fromkeys(PLAIN[name])})
    )
    with pytest.raises(CheckpointError, match="weight is F32, but quantization_config quantises"):
        ShapeSource(directory, TensorNames()).quantized(NAME, N, K)


def zeros(value: int) -> Tensors:
    return {"qzeros": torch.full_like(tensors_of("gptq-v1-4-32")[0]["qzeros"], value)}


OTHER_RULE = {"dynamic": {"+:.*up_proj": {"sym": True}}}
BAD: dict[str, tuple[str, dict[str, Any], Tensors, str]] = {
    "zeros of version 2 in 1": (
        "gptq-v1-4-32",
        {"sym": True},
        zeros(-0x77777778),
        "sym = True is not what model.layers.0.mlp.up_proj.qzeros are, unless checkpoint_format is "
        "gptq_v2",
    ),
    "zeros of version 1 in 2": (
        "gptq-v2-4-32",
        OTHER_RULE,
        zeros(0x77777777),
        "qzeros are, unless checkpoint_format is gptq",
    ),
    "another method": ("gptq-v1-4-32", {"method": "qqq"}, {}, "method = 'qqq' is not implemented"),
    "AutoRound's floats": (
        "gptq-v1-4-32",
        {"data_type": "mx_fp"},
        {},
        "data_type = 'mx_fp' is not",
    ),
    "scales of scales": (
        "gptq-v1-4-32",
        {"super_bits": 6},
        {},
        "super_bits = 6 is not implemented",
    ),
    "another format": (
        "ct-float-rows",
        {"format": "int-quantized"},
        {},
        "format = 'int-quantized' is not what model.layers.0.mlp.up_proj.weight is: F8_E4M3, ",
    ),
    "a format of packed words": (
        "ct-int-rows",
        {"format": "pack-quantized"},
        {},
        "format = 'pack-quantized' is not what model.layers.0.mlp.up_proj is, which has no weight",
    ),
    "FP4 as words": (
        "ct-nvfp4",
        {"format": "pack-quantized"},
        {},
        "'pack-quantized' is not what model.layers.0.mlp.up_proj.weight_packed is: U8, not I32",
    ),
    "rows in fewer bits": ("gptq-v1-4-32", {"act_bits": 8}, {}, "act_bits = 8 is not implemented"),
    "modules that are no names": (
        "gptq-v1-4-32",
        {"modules_in_block_to_quantize": [["a"], [3]]},
        {},
        "is not a list of names, nor of lists of names",
    ),
    "sparse": (
        "ct-pack-4",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {},
        "sparsity_config.format = 'sparse-24-bitmask' is not implemented; dense is",
    ),
    "tiles of a GPU": (
        "bnb-int8",
        {},
        {"weight_format": torch.tensor(2, dtype=torch.uint8)},
        "up_proj.weight_format is not 0, rows: tiles of a GPU",
    ),
    "a bias without a place": (
        "gptq-v1-4-32",
        {},
        {"bias": torch.ones(N)},
        "up_proj.bias (of 1 such) has no place",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_contradicts_is_refused(name: str, tmp_path: Path) -> None:
    case, changes, more, words = BAD[name]
    directory = written(tmp_path, case, changes, more)
    with pytest.raises(CheckpointError) as caught:
        read_matrix(directory)
    assert words in str(caught.value)


def test_symmetric_zeros_are_those_of_their_version(tmp_path: Path) -> None:
    for case, value in (("gptq-v1-4-32", 0x77777777), ("gptq-v2-4-32", -0x77777778)):
        directory = written(tmp_path / case, case, {"sym": True}, zeros(value))
        assert read_matrix(directory).zeros is None


def test_scales_of_a_cache_by_autofp8() -> None:
    config = {"quant_method": "fp8", "kv_cache_scheme": "static"}
    reader = Reader({"quantization_config": config}, "config.json")
    assert says_fp8(reader, Path("/nowhere"))


OLD, NEW = "language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"
_W4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
GROUPS = {"one": {"targets": [NEW], "weights": _W4}, "rest": {"targets": ["Linear"]}}
OF_TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed-tensors": ("ct-pack-4", {"config_groups": GROUPS}),
    "ModelOpt": (
        "modelopt-nvfp4",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {NEW: {"quant_algo": "NVFP4"}}},
    ),
    "GPTQ": ("gptq-v1-4-32", {"bits": 8, "dynamic": {"+:^model\\.language_m": {"bits": 4}}}),
    "AutoRound": ("gptq-v1-4-32", {"bits": 8, "extra_config": {NEW: {"bits": 4}}}),
}


@pytest.mark.parametrize("name", OF_TOWERS)
def test_modules_are_named_as_in_memory(name: str, tmp_path: Path) -> None:
    """Transformers writes `language_model.model`; its modules are `model.language_model`."""
    case, changes = OF_TOWERS[name]
    config = config_of(case) | changes
    directory = directory_of(tmp_path, tensors_of(case)[0], config, OLD)
    matrix = FileSource(directory, torch.device("cpu"), TensorNames()).quantized(OLD, N, K)
    assert matrix is not None
    want = tensors_of(case)[1]
    torch.testing.assert_close(dequantise(matrix)[::8], want, rtol=1e-6, atol=1e-7)


LEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed-tensors": ("ct-pack-4", {"ignore": [NEW]}),
    "expressions": ("ct-pack-4", {"ignore": ["re:^model[.]language_model.*up_proj"]}),
    "ModelOpt": ("modelopt-nvfp4", {"ignore": ["model.language_model.layers.0*"]}),
    "AWQ": ("awq-gemm-32", {"modules_to_not_convert": ["model.language_model.layers.0."]}),
    "fp8": ("hf-fp8-float", {"modules_to_not_convert": [NEW]}),
    "fp8, expressions": ("hf-fp8-float", {"modules_to_not_convert": ["model.language_.*.up_proj"]}),
    "bitsandbytes, expressions": ("bnb-nf4", {"llm_int8_skip_modules": [".*layers.[0-3]"]}),
    "bitsandbytes": ("bnb-nf4", {"llm_int8_skip_modules": ["model.language_model.layers.0.mlp"]}),
    "GPTQ": ("gptq-v1-4-32", {"dynamic": {"-:model.language_model": {}}}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_out_is_named_as_in_memory(name: str, tmp_path: Path) -> None:
    case, changes = LEFT[name]
    config = config_of(case) | changes
    directory = directory_of(tmp_path, {"weight": torch.zeros(N, K)}, config, OLD)
    assert ShapeSource(directory, TensorNames()).quantized(OLD, N, K) is None


def test_expressions_end_where_parts_of_names_do(tmp_path: Path) -> None:
    """As transformers reads them: `mlp.gate` is not `mlp.gate_proj`."""
    config = config_of("hf-fp8-float") | {"modules_to_not_convert": ["model.layers.*.mlp.up"]}
    directory = directory_of(tmp_path, {"weight": torch.zeros(N, K)}, config)
    with pytest.raises(CheckpointError, match="weight is F32, but quantization_config quantises"):
        ShapeSource(directory, TensorNames()).quantized(NAME, N, K)
    config["modules_to_not_convert"] = ["model.layers.(*"]
    directory_of(tmp_path, {"weight": torch.zeros(N, K)}, config)
    with pytest.raises(CheckpointError, match="which is no regular expression"):
        ShapeSource(directory, TensorNames()).quantized(NAME, N, K)


def test_rules_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of them, for each of thousands of experts, took minutes."""
    rules = [f"-:model[.]layers[.]{i}[.]" for i in range(1, 9)]
    gptq = Gptq(Reader({"dynamic": {rule: {} for rule in rules}}, ""))
    ignore = [f"re:{rule[2:]}" for rule in rules]
    compressed = CompressedTensors(Reader({"config_groups": GROUPS, "ignore": ignore}, ""))
    monkeypatch.setattr(re, "match", None)
    monkeypatch.setattr(re, "compile", None)
    assert gptq.excludes("model.layers.8.x") == "dynamic"
    assert gptq.excludes("model.layers.9.x") == ""
    assert compressed.excludes("model.layers.8.x") == "ignore"
    assert compressed.excludes(NEW) == ""


def test_fp8_by_rows_as_fbgemm_has_it(tmp_path: Path) -> None:
    """As in Llama-3.1-405B-Instruct-FP8."""
    codes, scales = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(N, 1) + 0.5
    bound = {"input_scale_ub": torch.tensor([1200.0])}
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    tensors = {"weight": codes, "weight_scale": scales}
    matrix = read_matrix(directory_of(tmp_path, tensors | bound, config))
    assert matrix.row_type == "e4m3"
    assert torch.equal(dequantise(matrix), codes.float() * scales)
