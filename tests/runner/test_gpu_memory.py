"""On a GPU the cache takes what is left, as measured, and no step allocates."""

import gc
import json
import time
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import make_model, random_prompts, save
from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.runner.memory import left_on_gpu
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu
WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def empty_gpu() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def test_what_loading_freed_is_left() -> None:
    """Packing a head takes several times its bytes for a moment."""
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.zeros(1 << 20, device=device)

    def step() -> None:
        torch.empty(64 << 20, dtype=torch.uint8, device=device)

    free = torch.cuda.mem_get_info(device)[0]
    passing = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    del passing
    left = left_on_gpu(device, step, [step])
    assert free - left < 300 << 20
    assert float(kept.sum()) == 0.0


def pool_bytes(directory: Path, **changes: object) -> int:
    """Return the bytes of a cache that only memory bounds."""
    config = EngineConfig(checkpoint=str(directory), load_format="random", **changes)
    plan = resolve(config)
    free = torch.cuda.mem_get_info()[0]
    runner = ModelRunner(plan)
    assert runner.num_blocks < plan.max_num_seqs * plan.max_model_len // plan.block_size
    size = runner.num_blocks * plan.block_bytes
    assert 0.8 * free < size < free
    assert torch.cuda.mem_get_info()[0] > 0.05 * free
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return size


def test_a_larger_step_leaves_a_smaller_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    sizes = [
        pool_bytes(tmp_path, max_num_seqs=2048, max_num_batched_tokens=tokens, cuda_graphs=False)
        for tokens in (2048, 32768)
    ]
    # The gate and up of 30,720 tokens more, at the least.
    assert sizes[0] - sizes[1] > 0.9 * 30_720 * 2 * 8192 * 2


def test_what_is_asked_for_beyond_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    config = EngineConfig(checkpoint=str(tmp_path), load_format="random")
    a_token = resolve(config).block_bytes // 32
    tokens = int(0.95 * torch.cuda.mem_get_info()[0] / a_token)
    plan = resolve(EngineConfig(**config_fields(config, kv_cache_tokens=tokens)))
    with pytest.raises(ConfigError, match=f"kv_cache_tokens = {tokens} takes"):
        ModelRunner(plan)


def config_fields(config: EngineConfig, **changes: object) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__} | changes


def serve(engine: Engine, prompts: list[list[int]], max_tokens: int) -> int:
    """Run all to their end; how many tokens came."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.0)
        engine.submit(b"test", wire.Submit(number, pack(prompt), sampling, time.monotonic_ns()))
    num_tokens = 0
    while engine.has_work:
        for tokens in engine.step().get(b"test", []):
            num_tokens += len(tokens.token_ids)
            assert tokens.finished is None or tokens.finished.error is None
    return num_tokens


def test_no_step_allocates_from_the_device(tmp_path: Path) -> None:
    checkpoint = save(make_model("llama"), tmp_path / "checkpoint")
    config = EngineConfig(
        checkpoint=str(checkpoint), dtype="bfloat16", max_num_seqs=64, max_num_batched_tokens=256
    )
    plan = resolve(config)
    engine = Engine(Limits(64, 256, 4096), ModelRunner(plan), None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    lengths = [1 + 37 * i % 200 for i in range(150)]
    assert serve(engine, random_prompts(lengths), 40) == 150 * 40
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
