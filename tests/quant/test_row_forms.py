"""Rows in int8 and e4m3: which files ask for such, and the forms that weights have by GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.quantised import NAME, K, N, config_of, directory_of, tensors_of
from slipstream.kernels.experts.grouped import expert_matrix
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packing import dense
from slipstream.kernels.runtime.registry import CPU, KNOWN, Target
from slipstream.models.axes import TensorNames
from slipstream.models.weights import FileSource, ShapeSource
from slipstream.quant import row_forms
from slipstream.quant.forms import form_of, form_of_ends, form_of_experts
from slipstream.quant.matrix import Kind, QuantMatrix, dequantise, stack
from slipstream.quant.rounding import rounded8
from slipstream.quant.row_forms import Factored

OF_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
OF_TENSORS = OF_TOKENS | {"strategy": "tensor", "dynamic": False}
# Rows as compressed-tensors' groups have them: what they are rounded to, and what the start says.
ROWS: dict[str, tuple[dict[str, Any] | None, str, str]] = {
    "by token": (OF_TOKENS, "int8", ""),
    "by tensor, static": (OF_TENSORS, "int8", ""),
    "by tensor, dynamic": (OF_TENSORS | {"dynamic": True}, "int8", ""),
    "with zeros": (OF_TOKENS | {"symmetric": False}, "", "8 bits by token with zeros"),
    "by group": (OF_TOKENS | {"strategy": "group", "group_size": 32}, "", "8 bits by group"),
    "in 4 bits": (OF_TOKENS | {"num_bits": 4}, "", "4 bits by token"),
    "in e4m3": (OF_TOKENS | {"type": "float"}, "", "rows in e4m3 beside weights in integers of 8"),
    "as they are": (None, "", ""),
}
INT8, E4M3 = (f"{each} products, rows quantised by token" for each in ("int8", "e4m3"))
PACKED = "kept packed, multiplied with 16-bit rows"


def read(directory: Path) -> tuple[QuantMatrix, FileSource]:
    source = FileSource(directory, torch.device("cpu"), TensorNames())
    found = source.quantized(NAME, N, K)
    assert found is not None
    return found, source


@pytest.mark.parametrize("case", ROWS)
def test_a_group_says_what_rows_are_rounded_to(case: str, tmp_path: Path) -> None:
    activations, row_type, said = ROWS[case]
    tensors, config = tensors_of("ct-int-rows")[0], config_of("ct-int-rows")
    config["config_groups"]["group_0"]["input_activations"] = activations
    if activations == OF_TENSORS:
        tensors["input_scale"] = torch.ones(1)
    found, source = read(directory_of(tmp_path, tensors, config))
    assert found.row_type == row_type
    rows = [note for note in source._notes if note.startswith("rows in ")]
    assert [said in note and "they are not rounded" in note for note in rows] == [True] * bool(said)
    scales = [note for note in source._notes if note.startswith("input_scale: read and not used")]
    assert len(scales) == ("input_scale" in tensors)


CT = [f"ct-{name}" for name in ("int-rows", "int-tensor", "int-rows-zeros", "float-rows")]
CT += [f"ct-{name}" for name in ("float-tensor", "float-blocks", "naive-4", "nvfp4", "mxfp4")]
CT += [f"ct-{name}" for name in ("pack-4", "pack-4-symmetric", "pack-8", "pack-2")]


@pytest.mark.parametrize("case", CT)
def test_rows_that_a_group_asks_for_are_rounded_or_the_start_says_why_not(
    case: str, tmp_path: Path
) -> None:
    """By strategies, types and sizes; static or made at each step."""
    tensors, config = tensors_of(case)[0], config_of(case)
    directory = directory_of(tmp_path, tensors, config)
    for strategy in ("token", "tensor", "group", "tensor_group", "channel"):
        for is_static in (False, True):
            for number, bits in (("int", 8), ("float", 8), ("float", 4), ("int", 4)):
                asked = {"type": number, "num_bits": bits, "strategy": strategy}
                asked |= {"dynamic": not is_static, "symmetric": True}
                config["config_groups"]["group_0"]["input_activations"] = asked
                (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
                found, source = read(directory)
                said = [note for note in source._notes if "they are not rounded" in note]
                wanted = {("int", 8): "int8", ("float", 8): "e4m3"}.get((number, bits), "none")
                assert (found.row_type == wanted) != bool(said), (asked, source._notes)
                assert found.row_type in ("", wanted)
                if found.kind is Kind.W4 and found.is_symmetric and found.is_plain:
                    is_e4m3 = wanted == "e4m3" and strategy in ("token", "tensor")
                    assert (found.row_type == "e4m3") == is_e4m3, "static or not"
    config["config_groups"]["group_0"]["input_activations"] = None
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    found, source = read(directory)
    assert not found.row_type
    assert not [note for note in source._notes if "not rounded" in note]


def test_rows_of_another_library_are_as_its_algorithm_says(tmp_path: Path) -> None:
    tensors = tensors_of("modelopt-int8")[0] | {"input_scale": torch.ones(())}
    for name in ("INT8_SQ", "W8A8_SQ_PER_CHANNEL", "W8A16"):
        config = config_of("modelopt-int8") | {"quant_algo": name}
        found, source = read(directory_of(tmp_path, tensors, config))
        assert found.row_type == ("" if name == "W8A16" else "int8")
        assert any(note.startswith("input_scale: read and not used") for note in source._notes)
    for name, rows in (("NVFP4", "floats of 4 bits"), ("W4A8_NVFP4_FP8", "e4m3")):
        config = config_of("modelopt-nvfp4") | {"quant_algo": name}
        _, source = read(directory_of(tmp_path, tensors_of("modelopt-nvfp4")[0], config))
        assert any(note.startswith(f"rows in {rows} beside weights in ") for note in source._notes)


E4M3_OF_TOKENS = OF_TOKENS | {"type": "float"}
OF_MODELOPT = {"quant_method": "modelopt"}
# What files of e4m3 by row say of rows, and whether these are rounded to e4m3.
ROWS_OF_E4M3: dict[str, tuple[str, dict[str, Any], bool]] = {
    "by token": ("ct-float-rows", {"input_activations": E4M3_OF_TOKENS}, True),
    "by tensor, static": (
        "ct-float-tensor",
        {"input_activations": E4M3_OF_TOKENS | {"strategy": "tensor", "dynamic": False}},
        True,
    ),
    "weights alone": ("ct-float-rows", {"input_activations": None}, False),
    "weights alone, by tensor": ("ct-float-tensor", {}, False),
    "in int8": ("ct-float-rows", {"input_activations": OF_TOKENS}, False),
    "in 4 bits": ("ct-float-rows", {"input_activations": E4M3_OF_TOKENS | {"num_bits": 4}}, False),
    "modelopt": ("modelopt-fp8-rows", OF_MODELOPT | {"quant_algo": "FP8"}, True),
    "modelopt, groups of weights": (
        "modelopt-fp8-rows",
        OF_MODELOPT | {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        False,
    ),
    "modelopt, groups": (
        "modelopt-fp8-rows",
        OF_MODELOPT | {"config_groups": {"group_0": {"input_activations": E4M3_OF_TOKENS}}},
        True,
    ),
    "hf": ("modelopt-fp8", {"quant_method": "fp8", "activation_scheme": "static"}, True),
}


@pytest.mark.parametrize("case", ROWS_OF_E4M3)
def test_rows_beside_e4m3_are_rounded_where_a_file_says_so(case: str, tmp_path: Path) -> None:
    """Else weights stay packed, and no kernel may round the rows that they meet."""
    name, changes, rounds = ROWS_OF_E4M3[case]
    config = changes
    if name.startswith("ct-"):
        config = config_of(name)
        config["config_groups"]["group_0"].pop("input_activations")
        config["config_groups"]["group_0"] |= changes
    found, _ = read(directory_of(tmp_path, tensors_of(name)[0], config))
    assert (found.row_type == "e4m3") is rounds
    for target in (each for each in KNOWN.values() if each.device == "cuda"):
        for dtype in (torch.bfloat16, torch.float16):
            form = form_of(found, target, dtype)
            assert form is not None
            has_products = rounds and target.capability >= (8, 9)
            assert form.name == (E4M3 if has_products else PACKED)
            made = form.make(found)
            assert isinstance(made, Matrix)
            assert (made.groups is None) is has_products
            assert made.takes_quantized is has_products
            experts = form_of_experts(found, 2, target, dtype)
            assert experts is not None
            kept = experts.make(found)
            assert isinstance(kept, Matrix)
            matrix = expert_matrix(kept, 2, None)
            assert (matrix.values.dtype == torch.float8_e4m3fn) is has_products
            assert (matrix.groups is None) is has_products
            if made.groups is not None:
                assert not made.groups.packing.takes_e4m3
                assert torch.equal(dense(made.values, made.groups), dequantise(found))
    assert form_of(found, CPU, torch.float32) is None  # dequantised


@pytest.mark.parametrize("case", ["ct-int-rows", "ct-int-tensor", "ct-int-rows-zeros"])
def test_files_have_the_form_of_their_target(case: str, tmp_path: Path) -> None:
    """By shapes alone, too; codes and scales stand for what they did before."""
    directory = directory_of(tmp_path, tensors_of(case)[0], config_of(case))
    shapes = ShapeSource(directory, TensorNames()).quantized(NAME, N, K)
    found, _ = read(directory)
    assert shapes is not None
    for target in (each for each in KNOWN.values() if each.device == "cuda"):
        for dtype in (torch.bfloat16, torch.float16):
            forms = [form_of(each, target, dtype) for each in (found, shapes)]
            assert forms[0] is forms[1]
            assert forms[0] is not None
            assert forms[0].name == (PACKED if case.endswith("zeros") else INT8)
            if forms[0].name == INT8:
                made = forms[0].make(found)
                assert (made.values.dtype, made.scales.dtype) == (torch.int8, torch.float32)
                assert torch.equal(made.values * made.scales[:, None], dequantise(found))
            assert "rows" in forms[0].said(found)
    for dtype in (torch.bfloat16, torch.float32):
        form = form_of(found, CPU, dtype)
        assert form is None or form.said(found).endswith(", rows as they come")


def test_what_no_gemm_takes_keeps_rows_of_16_bits() -> None:
    hopper = KNOWN["sm_90a"]
    made = rounded8(torch.randn(128, 256).bfloat16(), row_type="int8")
    form = form_of(made, hopper, torch.bfloat16)
    assert form is not None
    assert form.name == INT8
    ends = form_of_ends(made, hopper, torch.bfloat16)
    assert ends is not None
    assert ends.name == PACKED
    experts = form_of_experts(made, 2, hopper, torch.bfloat16)
    assert experts is not None
    assert experts.name == PACKED
    odd = rounded8(torch.randn(128, 264).bfloat16(), row_type="int8")  # no multiple of 16
    form = form_of(odd, hopper, torch.bfloat16)
    assert form is not None
    assert form.name == PACKED
    narrow = rounded8(torch.randn(104, 256).bfloat16(), row_type="int8")
    form = form_of(narrow, hopper, torch.bfloat16)
    assert form is not None
    assert form.name == PACKED
    assert form_of(made, hopper, torch.float32) is None


def test_factors_are_applied_before_rows_are_rounded() -> None:
    plain = rounded8(torch.randn(128, 256).bfloat16(), row_type="int8")
    factors = torch.rand(256) + 0.5
    form = form_of(replace(plain, factors=factors), KNOWN["sm_80"], torch.bfloat16)
    assert form is not None
    assert form.name == INT8
    made = form.make(replace(plain, factors=factors))
    assert isinstance(made, Factored)
    x = torch.randn(2, 256).bfloat16()
    assert torch.equal(made.rows(x), (x.float() * factors).bfloat16())
    assert torch.equal(made.matrix.values, plain.codes)
    order = replace(plain, order=torch.arange(256).flip(0))
    form = form_of(order, KNOWN["sm_80"], torch.bfloat16)
    assert form is not None
    assert form.name == PACKED


def test_rows_that_some_ask_for_are_rounded_for_none() -> None:
    one = rounded8(torch.randn(32, 64), row_type="int8")
    whole = stack([one, rounded8(torch.randn(16, 64))])
    assert whole is not None
    assert whole.row_type == ""
    both = stack([one, one])
    assert both is not None
    assert both.row_type == "int8"


def test_without_a_gemm_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_forms, "_has_gemm", lambda *_: False)
    made = rounded8(torch.randn(64, 64).half(), row_type="int8")
    form = form_of(made, Target("cuda", "sm_75", 40), torch.float16)
    assert form is not None
    assert form.name == PACKED
    assert str(made) == "8 bits by a row for rows in int8"
