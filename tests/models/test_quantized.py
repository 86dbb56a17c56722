"""Models in fp8 on the CPU: as transformers with the same roundings; how well they predict."""

import importlib.util
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.parity import LENGTHS, engine_greedy
from slipstream.config import EngineConfig
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.kernels.gemm.linear import choose
from slipstream.kernels.gemm.op import E4M3 as FP8
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.runner.matrices import Weight
from slipstream.runner.plan import resolve
from tokenizers import Tokenizer
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
QUALITY = ROOT / "benchmarks" / "quality.py"
FAMILIES = {
    "gemma3": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
}


def in_units(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows rounded to numbers of e4m3, and what one is."""
    unit = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return (x / unit).clamp(-448, 448).to(torch.float8_e4m3fn).float(), unit


def searched_units(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same with the unit, from the least to twice it, that a row's squares of errors choose."""
    whole = weight.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    units = torch.stack([whole * (2 ** (step / 8) / 448) for step in range(8)])
    numbers = (weight / units).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    chosen = (numbers * units - weight).square().sum(-1).argmin(0)
    rows = torch.arange(len(weight))
    return numbers[chosen, rows], units[chosen, rows]


def quantize_model(model: nn.Module) -> nn.Module:
    """All matrices but the head's in e4m3, and what they multiply."""

    def quantize(layer: nn.Linear) -> None:
        weight, units = searched_units(layer.weight.data)

        def forward(x: Tensor) -> Tensor:
            numbers, unit = in_units(x)
            product = (numbers @ weight.T).bfloat16() * unit * units[:, 0]
            return product if layer.bias is None else product + layer.bias

        layer.forward = forward

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            quantize(layer)
    return model


def rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


@pytest.mark.parametrize(
    ("dtype", "width", "num_rows", "keeps"),
    [
        (torch.bfloat16, 512, 1, True),
        (torch.bfloat16, 512, 2, False),  # the skinny GEMM is faster
        (torch.bfloat16, 272, 2, True),  # and does not take this
        (torch.bfloat16, 272, 3, False),
        (torch.float16, 512, 2, True),  # it does not scale to float16
        (torch.float16, 512, 3, False),
    ],
)
def test_few_rows_keep_their_16_bits(
    dtype: torch.dtype, width: int, num_rows: int, keeps: bool
) -> None:
    weight = Weight("w", "fp8", width, width, FP8, dtype, "norm", False, "", False)
    for stages in ({}, {"gate": "silu"}, {"norm": "", "adds": True}):
        spec = replace(weight, **stages).spec(num_rows, KNOWN["sm_90a"])
        route = choose(spec)
        assert (route.gemm.name == "gemv") == keeps
        assert route.path.quantises == (not keeps)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_same_roundings(family: str, tmp_path: Path) -> None:
    model = make_model(family, **FAMILIES[family])
    runner = make_runner(save(model, tmp_path), quantization="fp8")
    generations = [Generation(prompt, 3) for prompt in random_prompts([37, 1, 90, 8])]
    driver = Driver(runner, keep_logits=True)
    driver.step(generations[:1], 7)
    driver.finish(generations, chunk=13)
    ours, exact, same = [], [], []
    with torch.no_grad():
        for g in generations:
            tokens = torch.tensor([g.tokens])
            ours.append(torch.stack(g.logits))
            exact.append(model(tokens).logits[0, len(g.prompt) - 1 : -1])
        quantize_model(model)
        for g in generations:
            same.append(model(torch.tensor([g.tokens])).logits[0, len(g.prompt) - 1 : -1])
    truth, difference = torch.cat(same), torch.cat(ours) - torch.cat(same)
    noise = rms(torch.cat(exact) - truth)
    assert 0.02 < noise / rms(truth) < 0.3, "rounding shows"
    # Another order of sums may move a number to its neighbour, and then all that follows.
    assert difference.abs().amax(-1).median() < 1e-5
    assert rms(difference) < 0.5 * noise


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    runner = make_runner(save(make_model("llama"), tmp_path), quantization="fp8")
    prompts = random_prompts(LENGTHS)
    together = engine_greedy(runner, Limits(8, 37), prompts)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert engine_greedy(runner, Limits(8, 2048), [prompt]) == [tokens]


def test_deterministic_mode_holds(tmp_path: Path) -> None:
    """Together, and alone in other chunks, of which some sample nothing."""
    runner = make_runner(
        save(make_model("qwen3"), tmp_path),
        dtype="bfloat16",
        quantization="fp8",
        deterministic=True,
    )
    prompts = random_prompts([37, 1, 150])
    together = [Generation(prompt, 6) for prompt in prompts]
    Driver(runner).finish(together, chunk=60)
    for prompt, crowded in zip(prompts, together, strict=True):
        alone = Generation(prompt, 6)
        Driver(runner, seed=1).finish([alone], chunk=41)
        assert (alone.outputs, alone.log_probs) == (crowded.outputs, crowded.log_probs)


@pytest.mark.rest
def test_the_default_model_predicts_as_well() -> None:
    """On a module that it has not seen; docs/quantization.md has the figure for all of them."""
    spec = importlib.util.spec_from_file_location("quality", QUALITY)
    quality = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quality)
    text = (Path(sysconfig.get_path("stdlib")) / "sched.py").read_text()
    plain, quantized = (
        quality.bits_per_byte(CHECKPOINT, [text], quantization, "bfloat16", "cpu")
        for quantization in ("none", "fp8")
    )
    assert plain < 1.5
    assert 1e-5 < abs(quantized / plain - 1) < 0.01


def test_the_engine_generates_in_fp8() -> None:
    runner = make_runner(CHECKPOINT, dtype="bfloat16", quantization="fp8")
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    prompt = tokenizer.encode("import os\nimport sys\n\n\ndef main(").ids
    (tokens,) = engine_greedy(runner, Limits(4, 64), [prompt])
    assert ")" in tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        ({}, {"quantization": "int5"}, "quantization = 'int5' is not one of auto, none, fp8"),
        ({}, {"device": "cuda"}, "intermediate_size = 177"),
        ({"intermediate_size": 40_000}, {"device": "cuda"}, "at most 32768"),
        ({}, {"device": "cuda", "dtype": "float32"}, "needs dtype float16 or bfloat16"),
    ],
)
def test_what_cannot_be(
    sizes: dict[str, int],
    changes: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(make_model("llama", hidden_size=64, **sizes), tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr("slipstream.runner.devices.find_spec", lambda _: True)
    settings = {"quantization": "fp8", "dtype": "bfloat16"} | changes
    with pytest.raises(ConfigError, match=words):
        resolve(EngineConfig(checkpoint=str(tmp_path), **settings))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"no e4m3 products|is not one of"):
        resolve(EngineConfig(checkpoint=str(tmp_path), **settings))
