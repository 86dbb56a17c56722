"""Formats of quantised weights: tensors that the libraries themselves packed, and bad files."""

import json
import logging
from collections.abc import Callable
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
from hypothesis import given
from hypothesis import strategies as st
from slipstream.errors import CheckpointError
from slipstream.models.axes import TensorNames
from slipstream.models.formats.module import num_words, unpack
from slipstream.models.formats.registry import table
from slipstream.models.weights import FileSource
from slipstream.quant.matrix import Kind, dequantise

CPU = torch.device("cpu")


KINDS = {
    "awq-gemm-32": Kind.W4,
    "awq-gemm-128": Kind.W4,
    "awq-gemv-32": Kind.W4,
    "awq-gemv-64": Kind.W4,
    "bnb-int8": Kind.W8,
    "bnb-nf4": Kind.F4,
    "bnb-nf4-double": Kind.F4,
    "gptq-v1-2-32": Kind.W4,
    "gptq-v1-3-64": Kind.W4,
    "gptq-v1-4-128": Kind.W4,
    "gptq-v1-4-32": Kind.W4,
    "gptq-v1-8-64": Kind.W8,
    "gptq-v2-2-32": Kind.W4,
    "gptq-v2-3-64": Kind.W4,
    "gptq-v2-4-128": Kind.W4,
    "gptq-v2-4-32": Kind.W4,
    "gptq-v2-8-64": Kind.W8,
    "modelopt-fp8": Kind.F8,
    "modelopt-fp8-rows": Kind.F8,
    "modelopt-int4": Kind.W4,
    "modelopt-int8": Kind.W8,
    "modelopt-mxfp4": Kind.F4,
    "modelopt-nvfp4": Kind.F4,
}


@pytest.mark.parametrize("case", KINDS)
def test_what_a_library_packed_is_what_it_means(case: str, tmp_path: Path) -> None:
    """`tests/fixtures/quant/write.py` re-makes the files."""
    tensors, want = tensors_of(case)
    matrix = read_matrix(directory_of(tmp_path, tensors, config_of(case)))
    assert matrix.kind is KINDS[case]
    # int8 of bitsandbytes multiplies by 1 / 127, rounded.
    torch.testing.assert_close(dequantise(matrix)[::8], want, rtol=1e-6, atol=1e-7)


def test_inputs_are_scaled_behind_a_pre_quant_scale(tmp_path: Path) -> None:
    tensors, want = tensors_of("modelopt-int4")
    factors = torch.linspace(0.5, 2, K)
    directory = directory_of(
        tmp_path, tensors | {"pre_quant_scale": factors}, config_of("modelopt-int4")
    )
    found = read_matrix(directory)
    assert found.row_type == ""
    torch.testing.assert_close(dequantise(found)[::8], want * factors)
    config = config_of("modelopt-int4") | {"quant_algo": "W4A8_AWQ"}
    found = read_matrix(directory_of(tmp_path, tensors | {"pre_quant_scale": factors}, config))
    assert found.row_type == "e4m3"
    torch.testing.assert_close(dequantise(found)[::8], want * factors)


_E4M3 = {"num_bits": 8, "type": "float"}
_OF_GROUPS = _E4M3 | {"strategy": "group", "group_size": 128, "dynamic": True}
_OF_TOKENS = _E4M3 | {"strategy": "token", "dynamic": True}
_OF_TENSOR = _E4M3 | {"strategy": "tensor", "dynamic": False}


def of_blocks(activations: object) -> dict[str, Any]:
    weights = _E4M3 | {"strategy": "block", "block_structure": [128, 128]}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


BLOCKS: dict[str, tuple[dict[str, Any], bool]] = {
    "hf, dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
    "hf, static": ({"quant_method": "fp8", "activation_scheme": "static"}, True),
    "compressed-tensors, groups": (of_blocks(_OF_GROUPS), True),
    "compressed-tensors, tokens": (of_blocks(_OF_TOKENS), True),
    "compressed-tensors, static": (of_blocks(_OF_TENSOR), True),
    "compressed-tensors, 16 bits": (of_blocks(None), False),
    "modelopt, weights alone": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, False),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_e4m3_say_whether_rows_are_e4m3_too(case: str, tmp_path: Path) -> None:
    config, rounds = BLOCKS[case]
    scales, part = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), "weight_scale"
    if config["quant_method"] == "fp8":
        config, part = config | {"weight_block_size": [128, 128]}, "weight_scale_inv"
    tensors = {"weight": torch.ones(200, 256).to(torch.float8_e4m3fn), part: scales}
    found = FileSource(
        directory_of(tmp_path, tensors, config), torch.device("cpu"), TensorNames()
    ).quantized(NAME, 200, 256)
    assert found is not None
    assert (found.kind, found.group, found.row_type) == (Kind.F8, 128, "e4m3" if rounds else "")
    wanted = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    assert torch.equal(dequantise(found), wanted)


@given(st.sampled_from((2, 3, 4, 5, 6, 7, 8)), st.integers(1, 100), st.integers(0, 99))
def test_words_hold_values_of_any_width(bits: int, count: int, seed: int) -> None:
    """A stream of bits, the lowest first, cut into words."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (count,), generator=generator)
    stream = sum(int(value) << (i * bits) for i, value in enumerate(values))
    words = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(num_words(count, bits))]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    packed = torch.tensor([signed], dtype=torch.int32)
    assert torch.equal(unpack(packed, bits, count)[0].long(), values)


Spoil = Callable[[Tensors, dict[str, Any]], None]


def missing(part: str) -> Spoil:
    return lambda tensors, config: tensors.__delitem__(part)


def cut(part: str) -> Spoil:
    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[part] = tensors[part].flatten()[:-1].clone()

    return spoil


def as_floats(part: str) -> Spoil:
    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[part] = tensors[part].to(torch.float64)

    return spoil


def filled(part: str, value: float) -> Spoil:
    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[part] = torch.full_like(tensors[part], value)

    return spoil


def says(**changes: object) -> Spoil:
    return lambda tensors, config: config.update(changes)


def plain(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors.clear()
    tensors["weight"] = torch.zeros(N, K)


def bad_json(tensors: Tensors, config: dict[str, Any]) -> None:
    part = "weight.quant_state.bitsandbytes__nf4"
    tensors[part] = torch.full_like(tensors[part], 65)


NAN = float("nan")
BAD: dict[str, tuple[str, Spoil, str]] = {
    "no zeros": ("awq-gemm-32", missing("qzeros"), "up_proj.qzeros is missing"),
    "no scales": ("awq-gemm-32", missing("scales"), "up_proj.scales is missing"),
    "short words": ("awq-gemm-32", cut("qweight"), "qweight is [1023]"),
    "short zeros": ("awq-gemm-32", cut("qzeros"), "qzeros is ["),
    "floats as words": ("awq-gemm-32", as_floats("qweight"), "qweight is F64, not I32"),
    "NaN in scales": ("awq-gemm-32", filled("scales", NAN), "scales holds NaN"),
    "another group": ("awq-gemm-32", says(group_size=64), "scales is [4, 64], not [2, 64]"),
    "no group": ("awq-gemm-32", says(group_size=48), "group_size = 48 does not divide"),
    "a group of text": ("awq-gemm-32", says(group_size="x"), "group_size = 'x'"),
    "8 bits of AWQ": ("awq-gemm-32", says(bits=8), "bits = 8 is not 4"),
    "another version": ("awq-gemm-32", says(version="gemv"), "qweight is [128, 8], not"),
    "marlin": ("awq-gemm-32", says(version="marlin"), "version = 'marlin' is not one of gemm"),
    "excluded": (
        "awq-gemm-32",
        says(modules_to_not_convert=["mlp"]),
        "modules_to_not_convert = ['mlp'] leaves out model.layers.0.mlp.up_proj",
    ),
    "names that are none": (
        "awq-gemm-32",
        says(modules_to_not_convert="mlp"),
        "is not a list of names",
    ),
    "unknown key": ("awq-gemm-32", says(rotation="x"), "rotation = 'x' is not implemented"),
    "plain weights": ("awq-gemm-32", plain, "weight is F32, but quantization_config"),
    "5 bits of GPTQ": ("gptq-v2-4-32", says(bits=5), "bits = 5 is not one of 2, 3, 4, 8"),
    "other bits": ("gptq-v2-4-32", says(bits=8), "qweight is [16, 64], not [32, 64]"),
    "planar": ("gptq-v2-4-32", says(checkpoint_format="gptq_p"), "checkpoint_format = 'gptq_p'"),
    "a sorted one that says no": ("gptq-v2-4-32", says(desc_act=False), "desc_act = False"),
    "groups out of range": ("gptq-v2-4-32", filled("g_idx", 7), "g_idx has groups that are not"),
    "a rule that is none": (
        "gptq-v2-4-32",
        says(dynamic={"-:(": {}}),
        "which is no regular expression",
    ),
    "a rule that excludes": ("gptq-v2-4-32", says(dynamic={"-:.*up_proj": {}}), "quantised"),
    "fp4": ("bnb-nf4", says(bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type = 'fp4'"),
    "8 bits that are 4": ("bnb-nf4", says(load_in_4bit=False, load_in_8bit=True), "load_in_8bit"),
    "a state that is none": ("bnb-nf4", bad_json, "is not valid JSON"),
    "no table": ("bnb-nf4", missing("weight.quant_map"), "weight.quant_map is missing"),
    "no rows' scales": ("bnb-int8", cut("SCB"), "SCB is [63], not [64]"),
    "an unknown algorithm": (
        "modelopt-fp8",
        says(quant_algo="FP3"),
        "quant_algo = 'FP3' is not one of FP8",
    ),
    "another algorithm": ("modelopt-fp8", says(quant_algo="W8A16"), "weight is: F8_E4M3"),
    "int4 that is FP4": ("modelopt-nvfp4", says(quant_algo="W4A16_AWQ"), "the scales of"),
    "no second scale": ("modelopt-nvfp4", missing("weight_scale_2"), "weight_scale_2 is missing"),
    "NaN in e4m3": ("modelopt-fp8", filled("weight", NAN), "weight holds NaN"),
    "NaN in powers": ("modelopt-mxfp4", filled("weight_scale", 255), "weight_scale holds NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case, spoil, words = BAD[name]
    tensors, _ = tensors_of(case)
    config = config_of(case)
    spoil(tensors, config)
    with pytest.raises(CheckpointError) as caught:
        read_matrix(directory_of(tmp_path, tensors, config))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_zeros_of_gptq_that_wrap_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors, _ = tensors_of("gptq-v1-4-32")
    config = config_of("gptq-v1-4-32") | {"meta": {"quantizer": ["auto_gptq:0.7"]}}
    with caplog.at_level(logging.INFO):
        read_matrix(directory_of(tmp_path / "whole", tensors, config))
        assert not any("wrap" in line for line in caplog.messages)
        tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
        read_matrix(directory_of(tmp_path / "wrapped", tensors, config))
    assert any("wrap to 0" in line and "auto_gptq:0.7" in line for line in caplog.messages)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    tensors, _ = tensors_of("gptq-v2-4-32")
    path = directory_of(tmp_path, tensors, config_of("gptq-v2-4-32")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        read_matrix(tmp_path)


def test_quantised_tensors_need_a_configuration(tmp_path: Path) -> None:
    tensors, _ = tensors_of("gptq-v2-4-32")
    directory_of(tmp_path, tensors, {})
    with pytest.raises(CheckpointError, match=r"qweight is of quantised weights, but .* no config"):
        read_matrix(tmp_path)


def test_configurations_of_before_are_read(tmp_path: Path) -> None:
    """Beside config.json: GPTQ's, AWQ's and ModelOpt's own files."""
    for case, file in (
        ("gptq-v1-4-32", "quantize_config.json"),
        ("awq-gemm-32", "quant_config.json"),
        ("modelopt-int8", "hf_quant_config.json"),
    ):
        tensors, want = tensors_of(case)
        directory, config = directory_of(tmp_path / case, tensors, {}), config_of(case)
        del config["quant_method"]
        said = {"quantization": config} if file.startswith("hf") else config
        (directory / file).write_text(json.dumps(said))
        torch.testing.assert_close(
            dequantise(read_matrix(directory))[::8], want, rtol=1e-6, atol=1e-7
        )


def test_the_documentation_has_the_table_of_formats() -> None:
    page = Path(__file__).parents[2] / "docs" / "quantization.md"
    assert "\n".join(table()) in page.read_text()
