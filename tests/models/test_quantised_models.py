"""A model in each library's format: logits are those of its weights in fp32; what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.models import remote_drawn
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_runner,
    random_prompts,
    rewrite,
)
from fixtures.models.quantised import NAME, Tensors, config_of, directory_of, model_of, tiled
from fixtures.models.rearranged import REARRANGED, Of128, plain, quantise
from fixtures.tiers import quick_of
from slipstream.errors import CheckpointError, StartError
from slipstream.fuse.rewrite import places
from slipstream.kernels.gemm.op import E4M3, Matrix
from slipstream.kernels.gemm.packing import dense
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.models.axes import Moves, TensorNames
from slipstream.models.decoder import build
from slipstream.models.hf import read_config
from slipstream.models.moves import moved
from slipstream.models.source import Weights
from slipstream.models.transforms import arranged, head_order
from slipstream.models.weights import FileSource
from slipstream.quant.matrix import dequantise

HOST = torch.device("cpu")
CASES = {  # what a GPU keeps
    "awq-gemm-32": "4 bits by 32, packed",
    "awq-gemv-32": "4 bits by 32, packed",
    "awq-gemv-64": "4 bits by 64, packed",
    "gptq-v1-2-32": "4 bits by 32, packed",
    "gptq-v1-3-64": "4 bits by 64, packed",
    "gptq-v2-2-32": "4 bits by 32, packed",
    "gptq-v2-3-64": "4 bits by 64, packed",
    "gptq-v1-8-64": "8 bits by 64, packed",
    "gptq-v1-4-32": "4 bits by 32, packed",
    "gptq-v2-8-64": "8 bits by 64, packed",
    "modelopt-int4": "4 bits by 32, packed",
    "modelopt-int8": "int8",
    "modelopt-fp8": "e4m3",
    "modelopt-nvfp4": "e2m1 by 16, packed",
    "bnb-int8": "8 bits by a row, packed",
    "modelopt-mxfp4": "e2m1 by 32, packed",
    "modelopt-fp8-rows": "e4m3",
    "bnb-nf4": "16 bits",
    "bnb-nf4-double": "16 bits",
    "ct-pack-2": "4 bits by 32, packed",
    "ct-pack-3": "4 bits by 32, packed",
    "ct-pack-4": "4 bits by 32, packed",
    "ct-pack-5": "8 bits by 32, packed",
    "ct-pack-6": "8 bits by 32, packed",
    "ct-pack-8": "8 bits by 32, packed",
    "ct-pack-4-rows": "4 bits by a row, packed",
    "ct-pack-8-rows": "8 bits by a row, packed",
    "ct-int-rows": "int8",
    "ct-int-rows-zeros": "8 bits by a row, packed",
    "ct-float-rows": "e4m3",
    "ct-float-blocks": "e4m3 by 64, packed",
    "ct-naive-4": "4 bits by 32, packed for e4m3",
    "ct-nvfp4": "e2m1 by 16, packed",
    "ct-mxfp4": "e2m1 by 32, packed",
    "hf-fp8-float": "e4m3 by 64, packed",
    "hf-fp8-ue8m0": "e4m3 by 64, packed",
}

QUICK = {"awq-gemm-32", "awq-gemv-32", "gptq-v1-4-32", "gptq-v2-8-64", "modelopt-int4", "bnb-int8"}
QUICK |= {"modelopt-int8", "modelopt-fp8", "modelopt-nvfp4", "bnb-nf4", "ct-pack-4", "hf-fp8-float"}


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
def test_logits_are_those_of_the_dequantised_model(case: str, tmp_path: Path) -> None:
    model = model_of(case, tmp_path)
    driver = Driver(make_runner(tmp_path / "model"), keep_logits=True)
    generation = Generation(random_prompts([40], 256)[0], 3)
    driver.finish([generation], 13)
    with torch.no_grad():
        truth = model(torch.tensor([generation.tokens])).logits[0]
    assert len(generation.logits) == 3
    for i, logits in enumerate(generation.logits):
        expected = truth[len(generation.prompt) - 1 + i]
        assert (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


def kept(matrix: Matrix) -> tuple[str, torch.Tensor]:
    """How weights are kept, and what they stand for in the order of inputs."""
    if matrix.groups is not None:
        weight, order = dense(matrix.values, matrix.groups), matrix.groups.order
        if matrix.scales is not None:
            weight = weight * matrix.scales[:, None]
        if order is not None:
            weight = torch.empty_like(weight).index_copy_(1, order, weight)
        return str(matrix.groups.packing), weight
    if matrix.values.dtype in (E4M3, torch.int8):
        assert matrix.scales is not None
        kind = "e4m3" if matrix.values.dtype == E4M3 else "int8"
        return kind, matrix.values.float() * matrix.scales[:, None]
    return "16 bits", matrix.values.float()


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
def test_a_gpu_keeps_these_weights(case: str, tmp_path: Path) -> None:
    """Fused: q, k and v are one matrix, gate and up another."""
    layer = model_of(case, tmp_path).model.layers[1]
    directory = tmp_path / "model"
    model = read_config(directory)
    source = FileSource(directory, HOST, model.tensors)
    weights = Weights(source, HOST, torch.bfloat16, target=KNOWN["sm_90a"])
    decoder = build(model, weights, max_model_len=8)
    attention, mlp = layer.self_attn, layer.mlp
    parts = {
        "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "out": (attention.o_proj,),
        "gate_up": (mlp.gate_proj, mlp.up_proj),
        "down": (mlp.down_proj,),
    }
    of_layer = list(places(decoder))[4:8]
    assert {name for name, _ in of_layer} == parts.keys()
    for name, place in of_layer:
        assert isinstance(place.linear.weights, Matrix)
        truth = torch.cat([part.weight.data for part in parts[name]])
        kind, weight = kept(place.linear.weights)
        assert kind == CASES[case]
        rounding = {"rtol": 2**-8, "atol": 0.0} if kind == "16 bits" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(weight, truth, **rounding)


@pytest.mark.parametrize("name", quick_of(REARRANGED, {"falcon, groups", "gpt2", "chatglm"}))
def test_rearranged_and_of_experts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are, to the last bit, those of the checkpoint that has been dequantised before."""
    monkeypatch.setattr(remote_drawn, "Sizes", Of128)
    # Torch's last bits depend on where weights begin, and those in their file begin anywhere.
    monkeypatch.setattr(FileSource, "mapped", lambda *_: None)
    family, case, own = REARRANGED[name]
    logits = []
    for keeps in (True, False):
        directory = tmp_path / f"{keeps}"
        plain(family, own, directory)
        assert quantise(family, case, directory, keeps) > 4
        generation = Generation(random_prompts([20], 100)[0], 2)
        runner = make_runner(directory, quantization="none")
        Driver(runner, keep_logits=True).finish([generation], 11)
        logits.append(torch.stack(generation.logits))
    assert torch.equal(*logits)


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
@pytest.mark.parametrize("stored", quick_of([64, 32], [32]))
def test_moves_keep_what_a_matrix_stands_for(case: str, stored: int, tmp_path: Path) -> None:
    """Heads with zeros: rows of q, interleaved, and inputs of what follows attention."""
    parts = tiled(case, 64, 128, 1.0)
    directory = directory_of(tmp_path, parts, config_of(case))
    matrix = FileSource(directory, HOST, TensorNames()).quantized(NAME, 64, 128)
    assert matrix is not None
    order = head_order(stored, stored // 2, interleaved=True, padded=stored + 6)
    rows, columns = (lambda x, d=dim: arranged(x, order, stored, d) for dim in (0, 1))
    whole = dequantise(matrix)
    for moves, want in (
        (Moves(rows, None, lambda *shape: shape), rows(whole)),
        (Moves(None, columns, lambda *shape: shape), columns(whole)),
        (Moves(rows, columns, lambda *shape: shape), columns(rows(whole))),
    ):
        assert torch.equal(dequantise(moved(matrix, moves, "a matrix")), want)
    with pytest.raises(CheckpointError, match="a matrix is quantised, and changed as it is load"):
        moved(matrix, Moves(lambda x: x.square().sqrt() / x.norm(), None, lambda *s: s), "a matrix")


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"model.layers.1.{name}")


def leftover(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.extra_proj.qweight"] = torch.zeros(128, 8, dtype=torch.int32)


def half_plain(tensors: Tensors) -> None:
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"model.layers.1.mlp.up_proj.{part}"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(256, 128)


def embedding(tensors: Tensors) -> None:
    tensors["model.embed_tokens.qweight"] = tensors.pop("model.embed_tokens.weight").int()


REFUSED = {
    "no scales of one": (without("self_attn.k_proj.scales"), {}, "1.self_attn.k_proj.scales is m"),
    "one in 16 bits": (half_plain, {}, "1.mlp.up_proj.weight is F32, but quantization_config"),
    "a matrix too many": (leftover, {}, "extra_proj.qweight (of 1 such) has no place"),
    "an embedding": (embedding, {}, "tensor model.embed_tokens.weight is missing"),
    "quantised again": (lambda tensors: None, {"quantization": "int4"}, "are quantised already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    spoil, options, words = REFUSED[name]
    model_of("awq-gemm-32", tmp_path)
    rewrite(tmp_path / "model", spoil)
    with pytest.raises(StartError) as caught:
        make_runner(tmp_path / "model", **options)
    assert words in str(caught.value)


def test_a_quantised_head_that_is_tied_is_refused(tmp_path: Path) -> None:
    model_of("awq-gemm-32", tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))

    def head(tensors: Tensors) -> None:
        for part in ("qweight", "qzeros", "scales"):
            tensors[f"lm_head.{part}"] = tensors[f"model.layers.0.mlp.up_proj.{part}"].clone()
        tensors.pop("lm_head.weight", None)

    rewrite(tmp_path / "model", head)
    with pytest.raises(CheckpointError, match="lm_head has quantised tensors of its own"):
        make_runner(tmp_path / "model")
