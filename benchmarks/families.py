"""The decode step of some families at batch 1: `python benchmarks/families.py [NAME ...]`.

Weights are random, in bf16. The limit of a step is what it must read: the matrices of all blocks,
the head, and the cache of its context, over what the GPU reads. A share of 70 % is the goal.
`--layers N` cuts the models, to see on any machine that they run.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driving
import numpy as np
import torch
from engine import EngineTarget
from limits import rates_of
from shapes import SHAPES, write_config
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import Plan, resolve
from workloads import Workload

GOAL = 0.7
NUM_INPUT, NUM_OUTPUT = 128, 256
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2-xl": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
        "torch_dtype": "bfloat16",
    },
    "falcon-7b": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "vocab_size": 65024,
        "torch_dtype": "bfloat16",
    },
    "phi-3-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
        "vocab_size": 32064,
        "torch_dtype": "bfloat16",
    },
}
# Heads skip blocks of tokens in every other layer, but where no sequence is long enough.
FAMILIES["phi-3-small"] = {
    "architectures": ["Phi3SmallForCausalLM"],
    "model_type": "phi3small",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 32,
}
FAMILIES["phi-3-small-1k"] = FAMILIES["phi-3-small"] | {"max_position_embeddings": 1024}
LAYERS = ("n_layer", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Result:
    """A line of the table."""

    name: str
    milliseconds: float  # of a step
    gigabytes: float  # that it reads
    share: float  # of the limit


def planned(name: str) -> Plan:
    """Plan one request at a time of a model of random weights."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 512, "kv_cache_reuse": False}
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        write_config(name, Path(directory))
        how = {"dtype": "bfloat16", "load_format": "random"}
        return resolve(EngineConfig(checkpoint=directory, **(how | options)))


def bytes_of_step(plan: Plan, context: int) -> int:
    """Bytes that a step at batch 1 reads of weights and of the cache."""
    dims, size = plan.model.dims, plan.dtype.itemsize
    weights = plan.block_elements + dims.vocab_size * dims.hidden_size
    return weights * size + plan.kv.token_bytes * dims.num_layers * context


def measure(name: str, repeat: int) -> Result:
    """Time the steps between tokens of one request; the median of runs."""
    plan = planned(name)
    limits = Limits(1, 512, 1, kv_cache_reuse=False)
    engine = Engine(limits, ModelRunner(plan), None, name)
    vocabulary = plan.model.dims.vocab_size
    prompt = np.random.default_rng(1).integers(0, vocabulary, NUM_INPUT).tolist()
    workload = Workload(name, [prompt], NUM_OUTPUT)
    target, times = EngineTarget(engine), []
    for _ in range(repeat + 1):  # the first warms up
        times.append(driving.run(target, workload).itl_ms)
    own = statistics.median(t for t in times[1:] if t is not None)
    num_bytes = bytes_of_step(plan, NUM_INPUT + NUM_OUTPUT // 2)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    limit = num_bytes / rates_of(gpu, {}).read
    return Result(name, own, num_bytes / 1e9, limit / (own * 1e-3))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FAMILIES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layers", type=int, help="of each model, in the place of its own")
    args = parser.parse_args()
    for name in args.names:
        keys = FAMILIES[name]
        cut = {key: args.layers or keys[key] for key in LAYERS if key in keys}
        SHAPES[name] = keys | cut
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: as on an H200"
    print(f"batch 1, bf16, {NUM_INPUT} + {NUM_OUTPUT} tokens; {where}; goal {GOAL:.0%}")
    print(f"{'model':14} {'ms/token':>9} {'GB':>7} {'of limit':>9}")
    for name in args.names:
        found = measure(name, args.repeat)
        print(
            f"{name:14} {found.milliseconds:9.3f} {found.gigabytes:7.2f} {found.share:9.1%}"
            f"{'' if found.share >= GOAL else '  below the goal'}",
            flush=True,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
