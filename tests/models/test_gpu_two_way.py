"""ChatGLM 1 on a GPU: prompts that see both ways, decodes, graphs and preemption, beside fp64."""

import random
from pathlib import Path

import pytest
import torch
from fixtures.engine.ticks import ticks
from fixtures.models.checkpoints import make_runner
from fixtures.models.remote import Remote
from fixtures.models.two_way import chatglm1, logits_of, prompt
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.settings import limits_of
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu
# Of logits' deviation, in root mean square, which rounding costs models of this size.
BOUNDS = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-3}


def drawn(seed: int, step: int, dtype: torch.dtype) -> Remote:
    """A model with heads of `step` or less, whose weights a dtype can say, as kernels take them."""
    rng = random.Random(f"gpu {seed}")
    models = (chatglm1(rng, step) for _ in range(99))
    model = next(each for each in models if int(str(each.keys["inner_hidden_size"])) % 8 == 0)
    model.tensors = {name: x.to(dtype) for name, x in model.tensors.items()}
    return model


# Heads that have kernels (64), and others that are filled up with zeros.
@pytest.mark.parametrize("step", [64, 40, 4])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_logits_beside_fp64(dtype: str, step: int, tmp_path: Path) -> None:
    """Prompts, some with a part of their answer, and decodes."""
    model = drawn(step, step, getattr(torch, dtype))
    model.save(tmp_path)
    rng = random.Random(4)
    runner = make_runner(tmp_path, device="cuda", dtype=dtype, block_size=16)
    sequences = [[*prompt(rng, model.keys, n), 5, 6, 7, 8] for n in (150, 37, 2)]
    found, truth = zip(*logits_of(runner, model, sequences, rng), strict=True)
    expected = torch.stack(truth)
    error = (torch.stack(found).double().cpu() - expected).pow(2).mean().sqrt() / expected.std()
    assert error <= BOUNDS[dtype]


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_over_graphs_and_preemption(seed: int, tmp_path: Path) -> None:
    """Each is the likeliest of a dense pass, or as likely but for rounding."""
    model = drawn(seed, 64, torch.float32)
    model.save(tmp_path)
    sizes = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "kv_cache_tokens": 208}
    settings = {"device": "cuda", "dtype": "float32", "block_size": 16, **sizes}
    config = EngineConfig(checkpoint=str(tmp_path), **settings)
    engine = Engine(
        limits_of(config, resolve(config)), make_runner(tmp_path, **settings), None, ticks()
    )
    rng = random.Random(seed)
    prompts = [prompt(rng, model.keys, rng.randrange(60, 90)) for _ in range(5)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, each in enumerate(prompts):
        sampling = SamplingParams(max_tokens=40, temperature=0.0)
        engine.submit(b"bridge", Submit(i, pack(each), sampling, 0))
    while engine.has_work:
        for tokens in engine.step().get(b"bridge", []):
            outputs[tokens.request] += tokens.token_ids
        engine.check_integrity()
    assert engine._scheduler.num_preemptions > 0
    for asked, said in zip(prompts, outputs, strict=True):
        assert len(said) == 40
        truth = model(torch.tensor([asked + said])).logits[0][len(asked) - 1 : -1]
        lost = truth.amax(-1) - truth.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert lost.max() <= 2e-3 * truth.std()
