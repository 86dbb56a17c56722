"""Quantised checkpoints: what each format's tensors stand for, whole models, and bad files."""

import logging
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_runner,
    random_prompts,
)
from fixtures.quantize import tiny
from fixtures.tiers import quick_of
from safetensors.torch import load_file
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.native import library
from slipstream.models.axes import TensorNames
from slipstream.models.check import check_tensors
from slipstream.models.weights import FileSource
from slipstream.quant.matrix import dequantise
from slipstream.runner.plan import resolve
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
WRITTEN = tuple(tiny.FORMATS)


def values(directory: Path) -> dict[str, torch.Tensor]:
    """What all quantised matrices of a directory stand for, by name."""
    plain = load_file(directory.parent / "original" / "model.safetensors")
    source = FileSource(directory, CPU, TensorNames())
    found = {}
    for name, tensor in plain.items():
        if tensor.ndim == 2 and name.startswith("model.layers."):
            matrix = source.quantized(name.removesuffix(".weight"), *tensor.shape)
            assert matrix is not None, name
            found[name] = dequantise(matrix)
    return found


@pytest.mark.parametrize("scheme", WRITTEN)
def test_values_are_those_that_the_reference_reads(scheme: str, tmp_path: Path) -> None:
    """`read.safetensors` is what compressed-tensors and transformers made of the same files."""
    directory = tiny.small(tmp_path / "original")
    tiny.quantised(directory, tiny.FORMATS[scheme], tmp_path / scheme)
    read, found = load_file(tiny.READ), values(tmp_path / scheme)
    ours = {name: value for name, value in read.items() if name.startswith(f"{scheme}.")}
    assert len(ours) == 2
    for name, want in ours.items():
        module = name.removeprefix(f"{scheme}.")
        got = found[f"model.layers.0.{module}.weight"].to(want.dtype)
        # The reference rounds to bfloat16 on its way.
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


FAMILIES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {"sliding_window": 16}),
}
PAIRS = {
    f"{scheme}, {family}": (scheme, family)
    for i, scheme in enumerate(WRITTEN)
    for j, family in enumerate(FAMILIES)
    if (i + j) % 3 == 0
}


def last_logits(directory: Path, **options: object) -> list[torch.Tensor]:
    runner = make_runner(directory, **options)
    prompts = [[token % 256 for token in prompt] for prompt in random_prompts([37, 1, 60])]
    generations = [Generation(prompt, 3) for prompt in prompts]
    Driver(runner, keep_logits=True).finish(generations, chunk=29)
    return [each for generation in generations for each in generation.logits]


@pytest.mark.parametrize("pair", quick_of(PAIRS, ("fp8, llama", "int4, gemma3")))
def test_a_model_computes_what_transformers_computes_with_these_weights(
    pair: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheme, family = PAIRS[pair]
    directory = tiny.checkpoint(tmp_path / "original", *FAMILIES[family][:1], **FAMILIES[family][1])
    tiny.quantised(directory, tiny.FORMATS[scheme], tmp_path / scheme)
    check_tensors(tmp_path / scheme)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    stored = load_file(tmp_path / scheme / "model.safetensors")
    state = {name: stored[name] for name in model.state_dict() if name in stored}
    state |= values(tmp_path / scheme)
    model.load_state_dict(state, strict=False)
    runner = make_runner(tmp_path / scheme)
    ids = [each * 7 % 256 for each in range(50)]
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0, -1]
    generation = Generation(ids, 1)
    with caplog.at_level(logging.INFO):
        Driver(runner, keep_logits=True).finish([generation], chunk=23)
    assert (generation.logits[0] - want).abs().max() <= 5e-4 * want.abs().max()


def test_the_start_says_how_weights_are_multiplied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny.checkpoint(tmp_path / "original")
    tiny.quantised(directory, tiny.FORMATS["int8"], tmp_path / "int8")
    outputs = {}
    for dtype in ("float32", "bfloat16"):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            outputs[dtype] = last_logits(tmp_path / "int8", dtype=dtype)
        outputs[dtype, "said"] = [line for line in caplog.messages if line.startswith("weights")]
    said = "multiplied as they are by the CPU kernels"
    if library() is None:
        said = (
            "dequantised to float32 as they are loaded, which takes its memory and rounds them "
            "once; no GEMM here takes them as they are"
        )
    assert outputs["float32", "said"] == [f"weights of 8 bits by a row: {said} (8)"]
    assert outputs["bfloat16", "said"] == [
        "weights of 8 bits by a row: torch's product with 8 bits (8)"
    ]
    plain = last_logits(tmp_path / "int8", quantization="none")
    for got, want in zip(outputs["float32"], plain, strict=True):
        assert (got - want).abs().max() <= 5e-4 * want.abs().max()
    for got, want in zip(outputs["bfloat16"], plain, strict=True):
        assert (got - want).abs().max() < 0.05 * want.abs().max()


def test_quantised_weights_are_not_quantised_again(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "original")
    tiny.quantised(directory, tiny.FORMATS["int8"], tmp_path / "int8")
    config = EngineConfig(checkpoint=str(tmp_path / "int8"), device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization = 'fp8', but .* \(compressed-tensors\)"):
        resolve(config)
