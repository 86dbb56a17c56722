"""A cache in fewer bits on a GPU: near the CPU's; the same bits again, in graphs, beside others."""

from pathlib import Path

import pytest
import torch
from fixtures.engine.ticks import ticks
from fixtures.models import static_scales
from fixtures.models.checkpoints import Asker, make_model, make_runner, random_prompts, save
from fixtures.models.kv_cache import row
from slipstream.core.batch import Batch
from slipstream.engine.scheduler import Limits
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu
by_format = pytest.mark.parametrize("name", FORMATS)
VOCABULARY = 1009
ON_GPU = {"device": "cuda", "block_size": 16}


def checkpoint(path: Path, head_dim: int) -> Path:
    return save(make_model("llama", head_dim=head_dim, vocab_size=VOCABULARY), path)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """After chunks, and of a decode."""
    (prompt,) = random_prompts([50], VOCABULARY)
    parts = []
    for start, end in ((0, 20), (20, 49), (49, 50)):
        batch = Batch((row(prompt[start:end], [3, 1, 2, 0], start),), int(end - start == 1))
        parts.append(runner.logits(batch).float().cpu())
    return torch.cat(parts)


@by_format
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_logits_as_on_the_cpu(name: str, head_dim: int, tmp_path: Path) -> None:
    """In fp32, nearly: a number of K that lies between two of the format's may go to the other."""
    path = checkpoint(tmp_path, head_dim)
    wanted = logits_of(make_runner(path, kv_cache_dtype=name, block_size=16))
    plain = logits_of(make_runner(path))
    for dtype in ("float32", "bfloat16", "float16"):
        got = logits_of(make_runner(path, kv_cache_dtype=name, dtype=dtype, **ON_GPU))
        error, lost = ((x - wanted).pow(2).mean().sqrt() / plain.std() for x in (got, plain))
        assert float(error) < 0.25 * float(lost) + {"float32": 1e-4}.get(dtype, 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_static_scales(dtype: str, tmp_path: Path) -> None:
    """Logits equal transformers' with a cache of just these values."""
    model = make_model("llama", head_dim=128)
    path = static_scales.add(save(model, tmp_path), static_scales.scales())
    (prompt,) = random_prompts([50])
    runner = make_runner(path, kv_cache_dtype="fp8", dtype=dtype, **ON_GPU)
    got = static_scales.logits_of(runner, prompt)
    assert static_scales.is_near(got, model, prompt, {"float32": 1e-3}.get(dtype, 3e-2))


def run(runner: ModelRunner, numbers: list[int], limits: Limits) -> list[object]:
    asker = Asker(runner, limits, ticks())  # bits depend on how prompts are cut
    prompts = random_prompts([5 + 11 * i for i in range(8)], VOCABULARY)
    for i in numbers:
        sampling = SamplingParams(max_tokens=20 + i, seed=i, temperature=0.7, log_probs=True)
        asker.submit(prompts[i], sampling)
    asker.drain()
    return [(answer.token_ids, answer.log_probs) for answer in asker.answers.values()]


@by_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_and_chunks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    options = {"kv_cache_dtype": name, "dtype": dtype, "max_num_seqs": 8, **ON_GPU}
    path = checkpoint(tmp_path, 64)
    few = {"kv_cache_tokens": 512, "max_num_batched_tokens": 64}
    runner = make_runner(path, deterministic=True, **few, **options)
    crowd = run(runner, list(range(8)), Limits(8, 64))
    assert run(runner, list(range(8)), Limits(8, 40)) == crowd
    for i in (0, 3, 7):
        assert run(runner, [i], Limits(8, 64)) == [crowd[i]]


@by_format
def test_the_same_run_again_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """By plan, and in graphs, where there are any."""
    path = checkpoint(tmp_path, 128)
    runs = []
    for graphs in (True, True, False):
        runner = make_runner(
            path,
            kv_cache_dtype=name,
            dtype="bfloat16",
            cuda_graphs=graphs,
            max_num_seqs=8,
            **ON_GPU,
        )
        runs.append(run(runner, list(range(8)), Limits(8, 512)))
    assert runs[0] == runs[1]
    assert [len(tokens) for tokens, _ in runs[2]] == [len(tokens) for tokens, _ in runs[0]]
