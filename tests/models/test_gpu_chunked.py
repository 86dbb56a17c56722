"""Chunks of attention on a GPU: shared blocks, preemption, drafts and graphs, beside fp32."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from fixtures.engine.ticks import ticks
from fixtures.models.checkpoints import (
    Untimed,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.settings import limits_of
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.drafts import Drafts
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CHUNK, VOCAB, NUM_OUTPUTS = 128, 1009, 50
# No experts, of which a row may get another where two scores are near.
SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
SIZES |= {"intermediate_size_mlp": 512, "interleave_moe_layer_step": 9, "floor_scale": 100}
SIZES |= {
    "attention_chunk_size": CHUNK,
    "no_rope_layer_interval": 3,
    "max_position_embeddings": 1024,
}
# Of logits' deviation: what the token that was sampled may lack to the likeliest.
WAYS: dict[str, tuple[dict[str, object], float]] = {
    "float32": ({"dtype": "float32"}, 2e-3),
    "bfloat16": ({"dtype": "bfloat16"}, 0.25),
    "eager": ({"dtype": "bfloat16", "cuda_graphs": False}, 0.25),
    "deterministic": ({"dtype": "bfloat16", "deterministic": True}, 0.25),
    "fp8": ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, 0.6),
    "int8": ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, 0.3),
    "host memory": ({"dtype": "bfloat16", "kv_cache_host_bytes": 1 << 24}, 0.25),
}


def crowd() -> list[list[int]]:
    """Prompts of several chunks; some have their first chunks in common, some all of them."""
    base, other = random_prompts([3 * CHUNK + 70, 2 * CHUNK], VOCAB)
    return [base, base + other[:9], base + other[9:40], base[:CHUNK], other, base, base[:300]]


def answers(directory: Path, settings: dict[str, object], with_drafts: bool) -> list[list[int]]:
    """Greedy tokens of the crowd, which comes twice: half of it with guesses, right and wrong."""
    given = {"device": "cuda", "block_size": 16, "kv_cache_tokens": 1600, "max_num_seqs": 5}
    given |= {"max_num_batched_tokens": 100} | settings
    config = EngineConfig(checkpoint=str(directory), **given)
    runner = make_runner(directory, **given)
    engine, rng = (
        Engine(limits_of(config, resolve(config)), Untimed(runner), None, ticks()),
        random.Random(2),
    )
    outputs: list[list[int]] = [[] for _ in crowd()]
    for again in range(1 + with_drafts):
        for i, prompt in enumerate(crowd()):
            guesses = [each if rng.random() < 0.95 else 5 for each in outputs[i]]
            drafts = Drafts(token_ids=tuple(guesses)) if again else None
            sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, drafts=drafts)
            engine.submit(b"bridge", Submit(i + 100 * again, pack(prompt), sampling, 0))
        found: list[list[int]] = [[] for _ in crowd()]
        while engine.has_work:
            for tokens in engine.step().get(b"bridge", []):
                found[tokens.request % 100] += tokens.token_ids
            assert engine.fatal is None
        engine.check_integrity()
        outputs = found
    return outputs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = save(make_model("llama4", **SIZES).bfloat16(), tmp_path_factory.mktemp("chunked"))
    made = transformers.Llama4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return made.eval(), folder  # the same weights, rounded; frequencies are not


@pytest.mark.parametrize("with_drafts", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_greedy_tokens(name: str, with_drafts: bool, model: tuple[torch.nn.Module, Path]) -> None:
    """Each is the likeliest of a dense pass in fp32, or as likely but for rounding."""
    oracle, folder = model
    settings, bound = WAYS[name]
    for prompt, said in zip(crowd(), answers(folder, settings, with_drafts), strict=True):
        assert len(said) == NUM_OUTPUTS
        with torch.no_grad():
            truth = oracle(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        lost = truth.amax(-1) - truth.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert lost.max() <= bound * truth.std()
