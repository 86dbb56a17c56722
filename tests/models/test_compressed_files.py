"""Matrices that compressed-tensors and transformers wrote themselves: what they read of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.quantised import Tensors, directory_of, read_matrix
from safetensors import safe_open
from slipstream.errors import CheckpointError
from slipstream.quant.matrix import Kind, dequantise

FILE = Path(__file__).parents[1] / "fixtures" / "quant" / "compressed.safetensors"
# Case -> kind, inputs of a group, whether there are zeros, what rows are to be rounded to.
CASES = {
    "pack-2": (Kind.W4, 32, True, ""),
    "pack-3": (Kind.W4, 32, True, ""),
    "pack-4": (Kind.W4, 32, True, ""),
    "pack-5": (Kind.W8, 32, True, ""),
    "pack-6": (Kind.W8, 32, True, ""),
    "pack-8": (Kind.W8, 32, True, ""),
    "pack-4-symmetric": (Kind.W4, 128, False, ""),
    "pack-4-rows": (Kind.W4, 128, False, ""),
    "pack-8-rows": (Kind.W8, 128, False, ""),
    "int-rows": (Kind.W8, 128, False, "int8"),
    "int-tensor": (Kind.W8, 128, False, "int8"),
    "int-rows-zeros": (Kind.W8, 128, True, "int8"),
    "float-rows": (Kind.F8, 128, False, "e4m3"),
    "float-tensor": (Kind.F8, 128, False, "e4m3"),
    "float-blocks": (Kind.F8, 64, False, "e4m3"),
    "naive-4": (Kind.W4, 32, False, "e4m3"),
    "nvfp4": (Kind.F4, 16, False, ""),
    "mxfp4": (Kind.F4, 32, False, ""),
    "fp8-float": (Kind.F8, 64, False, "e4m3"),
    "fp8-ue8m0": (Kind.F8, 64, False, "e4m3"),
}


def read_case(case: str) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Return tensors, every eighth row of weights, and the configuration."""
    with safe_open(FILE, "pt") as file:
        names = [each for each in file.keys() if each.startswith(f"{case}.")]  # noqa: SIM118
        found = {each.removeprefix(f"{case}."): file.get_tensor(each) for each in names}
        return found, found.pop("want"), json.loads(file.metadata()[case])


@pytest.mark.parametrize("case", CASES)
def test_what_a_library_wrote_is_what_it_reads(case: str, tmp_path: Path) -> None:
    """`tests/fixtures/quant/write_compressed.py` re-makes the files."""
    tensors, want, config = read_case(case)
    matrix = read_matrix(directory_of(tmp_path, tensors, config))
    found = (matrix.kind, matrix.group, matrix.zeros is not None, matrix.row_type)
    assert found == CASES[case]
    # compressed-tensors scales e2m1 in bfloat16.
    most = 2**-8 if case == "nvfp4" else 1e-6
    torch.testing.assert_close(dequantise(matrix)[::8], want, rtol=most, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_another_configuration_is_refused(case: str, tmp_path: Path) -> None:
    """A contradiction is a configuration of other numbers, in the library's own words."""
    tensors, _, config = read_case(case)
    if case.startswith("fp8"):
        config["weight_block_size"] = [16, 32]
    else:
        weights = config["config_groups"]["group_0"]["weights"]
        weights["type"] = "int" if weights["type"] == "float" else "float"
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_matrix(directory_of(tmp_path, tensors, config))


def test_scales_in_a_byte_that_are_no_number_are_refused(tmp_path: Path) -> None:
    tensors, _, config = read_case("fp8-ue8m0")
    scales = torch.full_like(tensors["weight_scale_inv"].view(torch.uint8), 255)
    tensors["weight_scale_inv"] = scales.view(torch.float8_e8m0fnu)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale_inv holds NaN"):
        read_matrix(directory_of(tmp_path, tensors, config))


def test_experts_in_fp4_are_refused(tmp_path: Path) -> None:
    tensors, _, config = read_case("fp8-float")
    with pytest.raises(CheckpointError, match="expert_dtype = 'fp4' is not fp8"):
        read_matrix(directory_of(tmp_path, tensors, config | {"expert_dtype": "fp4"}))
