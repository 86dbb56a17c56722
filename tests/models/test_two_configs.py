"""What a checkpoint says of its weights in several places: read from each, and never two of a kind.

`quantization_config` may be in `text_config`, or be called `compression_config`; ModelOpt writes
hf_quant_config.json beside it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.checkpoints import make_model, save
from fixtures.models.quantised import (
    NAME,
    K,
    N,
    config_of,
    directory_of,
    read_matrix,
    tensors_of,
)
from slipstream.errors import CheckpointError
from slipstream.models.axes import TensorNames
from slipstream.models.cache_scheme import METHODS, quantization_of
from slipstream.models.hf import read_config
from slipstream.models.weights import ShapeSource
from slipstream.quant.matrix import dequantise

NVFP4 = config_of("modelopt-nvfp4") | {"ignore": ["lm_head"]}
SAID = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
SAID |= {"exclude_modules": ["lm_head"]}
MLP = "model.layers.0.mlp"


def both(folder: Path, own: dict[str, Any], beside: dict[str, Any]) -> Path:
    """Write a matrix of NVFP4 with what both files say of it; a change to None leaves a key out."""
    said, there = NVFP4 | own, SAID | beside
    kept = {key: value for key, value in said.items() if value is not None}
    directory = directory_of(folder, tensors_of("modelopt-nvfp4")[0], kept)
    there = {key: x for key, x in there.items() if x is not None or key not in beside}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": there}))
    return directory


def layers(algorithm: str) -> dict[str, Any]:
    own = {MLP: {"quant_algo": algorithm, "group_size": 16}}
    return {"quant_algo": "MIXED_PRECISION", "group_size": None, "quantized_layers": own}


CACHE = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
AGREE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the same": ({}, {}),
    "another case": ({"quant_algo": "nvfp4"}, {}),
    "no size there": ({}, {"group_size": None}),
    "no size here": ({"group_size": None}, {}),
    "the module is named": ({"ignore": ["lm_head", "*.head"]}, {}),
    "a cache that one names": ({}, {"kv_cache_quant_algo": "FP8"}),
    "a cache that both name": (CACHE, {"kv_cache_quant_algo": "FP8"}),
    "layers": (layers("NVFP4"), layers("nvfp4")),
    "all of it is there": ({"quant_algo": None, "group_size": None, "ignore": None}, {}),
}
DIFFER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "algorithms": (
        {},
        {"quant_algo": "FP8"},
        "quantization.quant_algo = 'FP8' contradicts quant_algo = 'NVFP4' in config.json's "
        "quantization_config",
    ),
    "weights in 16 bits there": (
        {},
        {"quant_algo": ""},
        "quantization.quant_algo = '' contradicts quant_algo = 'NVFP4'",
    ),
    "another library": (
        {"quant_method": "compressed-tensors", "quant_algo": None, "group_size": None},
        {},
        "quantization.quant_algo = 'NVFP4' contradicts quant_method = 'compressed-tensors' in",
    ),
    "sizes of groups": (
        {},
        {"group_size": 32},
        "quantization.group_size = 32 contradicts group_size = 16 in config.json's quantization_",
    ),
    "sizes of config_groups": (
        {"group_size": None, "config_groups": {"a": {"weights": {"group_size": 16}}}},
        {"group_size": 32},
        "quantization.group_size = 32 contradicts group_size = 16 in config.json's quantization_",
    ),
    "caches": (
        CACHE,
        {},
        "quantization.kv_cache_quant_algo = None contradicts kv_cache_scheme = {'num_bits': 8, ",
    ),
    "layers": (
        layers("NVFP4"),
        layers("FP8"),
        f"quantization.quantized_layers.{MLP}.quant_algo = 'FP8' contradicts quant_algo = 'NVFP4' "
        "in config.json's quantization_config.quantized_layers",
    ),
    "modules": (
        {},
        {"exclude_modules": ["lm_head", f"{MLP}*"]},
        f"quantization.exclude_modules = ['lm_head', '{MLP}*'] leaves out {NAME}, whose tensors",
    ),
}


@pytest.mark.parametrize("name", AGREE)
def test_files_that_agree_are_read(name: str, tmp_path: Path) -> None:
    matrix = read_matrix(both(tmp_path, *AGREE[name]))
    want = tensors_of("modelopt-nvfp4")[1]
    torch.testing.assert_close(dequantise(matrix)[::8], want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", DIFFER)
def test_files_that_contradict_are_refused(name: str, tmp_path: Path) -> None:
    own, beside, words = DIFFER[name]
    with pytest.raises(CheckpointError) as caught:
        read_matrix(both(tmp_path, own, beside))
    assert f"{tmp_path}/hf_quant_config.json: {words}" in str(caught.value)


def test_a_module_that_one_leaves_out_is_refused(tmp_path: Path) -> None:
    """The matrix is in 16 bits, as config.json says; the file beside it says otherwise."""
    directory = both(tmp_path, {"ignore": [f"{MLP}*"]}, {})
    directory_of(tmp_path, {"weight": torch.zeros(N, K)}, NVFP4 | {"ignore": [f"{MLP}*"]})
    words = f"{NAME}.weight is F32, but quantization of hf_quant_config.json quantises {NAME}"
    with pytest.raises(CheckpointError, match=words):
        ShapeSource(directory, TensorNames()).quantized(NAME, N, K)


PLACES = {
    "text_config": {"text_config": {"quantization_config": config_of("ct-pack-4")}},
    "compression_config": {"compression_config": config_of("ct-pack-4")},
    "in both places": {
        "text_config": {"quantization_config": config_of("awq-gemm-32")},
        "quantization_config": config_of("ct-pack-4"),
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_read_from_each_place(place: str, tmp_path: Path) -> None:
    tensors, want = tensors_of("ct-pack-4")
    directory = directory_of(tmp_path, tensors, {})
    (directory / "config.json").write_text(json.dumps(PLACES[place]))
    torch.testing.assert_close(dequantise(read_matrix(directory))[::8], want, rtol=1e-6, atol=1e-7)


def test_a_method_by_itself_quantises(tmp_path: Path) -> None:
    """AWQ's defaults are those of its library; a cache alone may be what other methods mean."""
    tensors, want = tensors_of("awq-gemm-128")
    matrix = read_matrix(directory_of(tmp_path, tensors, {"quant_method": "awq"}))
    torch.testing.assert_close(dequantise(matrix)[::8], want, rtol=1e-6, atol=1e-7)
    cache = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    assert quantization_of(directory_of(tmp_path, tensors, cache)) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two keys": (
        {
            "quantization_config": {"quant_method": "awq"},
            "compression_config": {"quant_method": "x"},
        },
        "compression_config = {'quant_method': 'x'} contradicts quantization_config = {'quant_",
    ),
    "MLX": (
        {"quantization": {"group_size": 64, "bits": 4}},
        "quantization = {'group_size': 64, 'bits': 4} is MLX's, which is not implemented",
    ),
    "MLX, both keys": (
        {key: {"group_size": 64, "bits": 4} for key in ("quantization", "quantization_config")},
        "quantization = {'group_size': 64, 'bits': 4} is MLX's, which is not implemented",
    ),
    "no method": (
        {"quantization_config": {"bits": 4}},
        "quantization_config.quant_method = None is not one of compressed-tensors, awq, gptq",
    ),
}
OTHERS = (
    "torchao hqq quanto eetq aqlm vptq spqr higgs fp_quant quark bitnet exl2 exl3 qqq sinq gguf"
)
for each in OTHERS.split():
    said = f"quantization_config.quant_method = '{each}' is not one of {', '.join(METHODS)}"
    REFUSED[each] = {"quantization_config": {"quant_method": each, "bits": 4}}, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the config.json of a model in 16 bits."""
    path = save(make_model("llama"), tmp_path_factory.mktemp("whole")) / "config.json"
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_named(name: str, whole: dict[str, Any], tmp_path: Path) -> None:
    keys, words = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(whole | keys))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert f"{tmp_path}/config.json: {words}" in str(caught.value)


def test_a_contradiction_is_known_before_weights_are_read(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(whole | {"quantization_config": NVFP4}))
    there = {"quantization": SAID | {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(there))
    with pytest.raises(CheckpointError, match="quant_algo = 'FP8' contradicts"):
        read_config(tmp_path)


def test_a_key_that_is_no_object_is_none_of_mlx(whole: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(whole | {"quantization": "none"}))
    assert "quantization" in read_config(tmp_path).ignored
