"""Models in fewer bits on a GPU: no worse than on the CPU, at any number of rows."""

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
from fixtures.models.rows_of_gpu import round_rows_as_on_gpu
from fixtures.quantize import tiny
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream_quantize.opened import Opened

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "intermediate_size": 560}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "gemma3": {},
}
# Rows of one token: few enough to leave activations in 16 bits, and not; then prompts.
PROMPTS = [([1], 1), ([1] * 4, 2), ([1] * 40, 3), ([70, 3, 20], 4)]


def logits(
    runner: ModelRunner, prompts: list[tuple[list[int], int]] = PROMPTS
) -> list[torch.Tensor]:
    """Return the logits of the token after every prompt; long ones are one chunk."""
    results = []
    for lengths, seed in prompts:
        generations = [Generation(prompt, 1) for prompt in random_prompts(lengths, seed=seed)]
        chunk = 50 if max(lengths) < 512 else max(lengths)
        Driver(runner, keep_logits=True).finish(generations, chunk=chunk)
        results.append(torch.stack([g.logits[0] for g in generations]).double())
    return results


def rms(x: torch.Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


@pytest.mark.parametrize(
    ("family", "dtype", "scheme"),
    [
        ("llama", "bfloat16", "fp8"),
        ("llama", "float16", "fp8"),
        ("qwen3", "bfloat16", "fp8"),
        ("gemma3", "bfloat16", "fp8"),
        ("llama", "bfloat16", "int4"),
        ("qwen3", "float16", "int4"),
        ("gemma3", "bfloat16", "int4"),
        ("llama", "float16", "int8"),
        ("llama", "bfloat16", "w8a8"),
        ("qwen3", "float16", "w8a8"),
        ("gemma3", "bfloat16", "w8a8"),
    ],
)
def test_error_is_that_of_the_cpu(
    family: str, dtype: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scheme == "w8a8":  # rows in int8 on the CPU, too
        round_rows_as_on_gpu(monkeypatch)
    save(make_model(family, **SIZES, **FAMILIES[family]), tmp_path)
    settings = {"dtype": dtype, "quantization": scheme, "block_size": 16}
    truth = logits(make_runner(tmp_path))
    cpu = logits(make_runner(tmp_path, **settings))
    gpu = logits(make_runner(tmp_path, device="cuda", cuda_graphs=False, **settings))
    for exact, there, here in zip(truth, cpu, gpu, strict=True):
        assert rms(here - exact) <= 1.5 * rms(there - exact)
        assert rms(here - exact) <= (1.0 if scheme == "int4" else 0.25) * rms(exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_blocks_of_e4m3_stay_packed(dtype: str, tmp_path: Path) -> None:
    """Long prompts' rows are rounded to e4m3 on a Hopper, in bfloat16."""
    sizes = SIZES | {"vocab_size": 1009, "max_position_embeddings": 1024}  # what prompts draw from
    plain = tiny.checkpoint(tmp_path / "plain", **sizes)
    tiny.quantised(plain, tiny.FORMATS["fp8-block"], tmp_path / "blocks")
    cases = [*PROMPTS, ([700], 5)]
    settings = {"dtype": dtype, "block_size": 16, "max_model_len": 1024}
    truth = logits(make_runner(tmp_path / "blocks", max_model_len=1024), cases)
    cpu = logits(make_runner(tmp_path / "blocks", **settings), cases)
    gpu = logits(
        make_runner(tmp_path / "blocks", device="cuda", cuda_graphs=False, **settings), cases
    )
    for exact, there, here in list(zip(truth, cpu, gpu, strict=True))[:-1]:
        assert rms(here - exact) <= 1.5 * rms(there - exact)
    assert rms(gpu[-1] - truth[-1]) <= 0.25 * rms(truth[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_beside_e4m3_stay_where_the_file_rounds_none(dtype: str, tmp_path: Path) -> None:
    """Then the error is that of the CPU, which never rounds them; else it is several times that."""
    sizes = SIZES | {"vocab_size": 1009, "max_position_embeddings": 1024}
    plain = tiny.checkpoint(tmp_path / "plain", **sizes)
    groups, recipe = Opened(plain, "cpu").groups, tiny.FORMATS["fp8"]
    tiny.quantised(plain, recipe, tmp_path / "kept", [name for group in groups for name in group])
    tiny.quantised(plain, recipe, tmp_path / "rounded")
    cases = [*PROMPTS, ([700], 5)]
    settings = {"dtype": dtype, "block_size": 16, "max_model_len": 1024}
    truth = logits(make_runner(tmp_path / "kept", max_model_len=1024), cases)
    cpu = logits(make_runner(tmp_path / "kept", **settings), cases)
    on_gpu = settings | {"device": "cuda", "cuda_graphs": False}
    gpu, rounded = (
        logits(make_runner(tmp_path / name, **on_gpu), cases) for name in ("kept", "rounded")
    )
    for exact, there, here in zip(truth, cpu, gpu, strict=True):
        assert rms(here - exact) <= 1.5 * rms(there - exact)
    if torch.cuda.get_device_capability() >= (8, 9):
        assert rms(rounded[-1] - truth[-1]) >= 2 * rms(gpu[-1] - truth[-1])


@pytest.mark.parametrize("scheme", ["fp8", "int4", "w8a8"])
def test_the_engine_repeats_itself(scheme: str, tmp_path: Path) -> None:
    """Graphs or none: equal batches give equal tokens, and graphs give about the same."""
    directory = save(make_model("llama", **SIZES), tmp_path)
    prompts = random_prompts(LENGTHS * 5)
    tokens = []
    for graphs in (True, False):
        runner = make_runner(
            directory,
            device="cuda",
            dtype="bfloat16",
            quantization=scheme,
            block_size=16,
            cuda_graphs=graphs,
            max_num_seqs=16,
        )
        tokens += [engine_greedy(runner, Limits(16, 150), prompts) for _ in range(2)]
    assert tokens[0] == tokens[1]
    assert tokens[2] == tokens[3]
    same = sum(a == b for a, b in zip(tokens[0], tokens[2], strict=True))
    assert same >= len(prompts) // 2  # padding changes which kernel cuBLASLt takes
