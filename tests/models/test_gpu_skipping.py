"""Phi-3-small on a GPU: heads skip blocks in decodes, chunks and graphs; beside fp64."""

import random
from pathlib import Path

import pytest
import torch
from fixtures.models import phi3small, remote_drawn
from fixtures.models.checkpoints import Driver, Generation, make_runner, random_prompts
from fixtures.models.parity import engine_greedy
from fixtures.models.remote import Remote
from slipstream.engine.scheduler import Limits

pytestmark = pytest.mark.gpu
# Of logits' deviation, in root mean square, which rounding costs models of this size.
BOUNDS = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-3}
CACHES = {"auto": 0.0, "fp8": 0.1, "int8": 0.05, "int4": 0.5}


def drawn(dtype: torch.dtype, size: int = 64) -> Remote:
    """A model of three layers, of which the first and the last skip blocks; as a dtype says it."""
    rng = random.Random(f"gpu {size}")
    sizes = remote_drawn.Sizes(rng)
    sizes.groups, sizes.heads, sizes.size, sizes.layers = 2, 8, size, 3
    sizes.hidden, sizes.inner, sizes.vocab = 8 * size, 192, 500
    model = phi3small.drawn(rng, sizes, remote_drawn._filled, longest=1024)
    model.keys |= {"blocksparse_block_size": 64, "blocksparse_num_local_blocks": 2}
    model.keys |= {"blocksparse_vert_stride": 3, "blocksparse_homo_head_pattern": False}
    model.keys |= {"dense_attention_every_n_layers": 2, "rope_scaling": None, "gegelu_limit": 3.0}
    model.tensors = {name: x.to(dtype) for name, x in model.tensors.items()}
    return model


def error_of(model: Remote, generations: list[Generation]) -> float:
    """What logits differ by from fp64, root mean square over deviation, of tokens that are said."""
    pairs = []
    for each in generations:
        truth = model(torch.tensor([each.tokens])).logits[0][len(each.prompt) - 1 : -1]
        pairs.append((torch.stack(each.logits).double().cpu(), truth))
    ours, truth = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
    said = truth[0] > -1e30
    return float((ours - truth)[:, said].pow(2).mean().sqrt() / truth[:, said].std())


@pytest.mark.parametrize("size", [64, 40])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_logits_beside_fp64(dtype: str, size: int, tmp_path: Path) -> None:
    """Chunks that cross borders of blocks, beside decodes, and alone; graphs are by shapes."""
    model = drawn(getattr(torch, dtype), size)
    model.save(tmp_path)
    driver = Driver(
        make_runner(tmp_path, device="cuda", dtype=dtype, block_size=16), keep_logits=True
    )
    generations = [Generation(p, 9) for p in random_prompts([700, 130, 3, 128, 330], 500)]
    driver.step(generations[1:3], 200)
    for chunk in (50, 200, 64):
        driver.step(generations, chunk)
    driver.finish(generations, 600)
    assert error_of(model, generations) <= BOUNDS[dtype]


@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_caches(cached: str, deterministic: bool, tmp_path: Path) -> None:
    model = drawn(torch.bfloat16)
    model.save(tmp_path)
    options = {"kv_cache_dtype": cached, "deterministic": deterministic, "block_size": 32}
    driver = Driver(
        make_runner(tmp_path, device="cuda", dtype="bfloat16", **options), keep_logits=True
    )
    generations = [Generation(p, 5) for p in random_prompts([400, 129, 250], 500)]
    driver.finish(generations, 150)
    assert error_of(model, generations) <= BOUNDS["bfloat16"] + CACHES[cached]


def test_a_row_alone_and_in_a_crowd_has_the_same_bits(tmp_path: Path) -> None:
    """In deterministic mode, in chunks of any size."""
    drawn(torch.bfloat16).save(tmp_path)
    found = []
    for chunk, beside in ((1000, 1), (77, 4)):
        runner = make_runner(
            tmp_path, device="cuda", dtype="bfloat16", block_size=16, deterministic=True
        )
        driver = Driver(runner, seed=chunk, keep_logits=True)
        prompts = random_prompts([300, 20, 520, 128], 500)
        generations = [Generation(p, 6) for p in prompts]
        for first in range(0, 4, beside):
            driver.finish(generations[first : first + beside], chunk)

        found.append([torch.stack(each.logits) for each in generations])
    for alone, crowd in zip(*found, strict=True):
        assert torch.equal(alone, crowd)


@pytest.mark.parametrize("options", [{}, {"speculation": "suffix"}], ids=str)
def test_greedy_tokens_over_graphs_and_preemption(
    options: dict[str, object], tmp_path: Path
) -> None:
    """Each is the likeliest of a dense pass, or as likely but for rounding."""
    model = drawn(torch.float32)
    model.save(tmp_path)
    settings = {"device": "cuda", "dtype": "float32", "block_size": 16, "kv_cache_tokens": 1536}
    prompts = random_prompts([600, 7, 300, 129], 500)
    prompts += [prompt[:250] + prompt[:9] for prompt in prompts]
    runner = make_runner(tmp_path, **(settings | options))
    for prompt, said in zip(prompts, engine_greedy(runner, Limits(4, 200), prompts), strict=True):
        truth = model(torch.tensor([prompt + said])).logits[0][len(prompt) - 1 : -1]
        best = truth.max(-1).values
        assert bool((best - truth.gather(1, torch.tensor(said)[:, None])[:, 0] < 1e-2).all())
