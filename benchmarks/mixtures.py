"""Decode steps of mixtures of experts: `python benchmarks/mixtures.py [NAME ...] [--peer PYTHON]`.

Weights are random: Qwen3-30B-A3B's shape in bf16, Mixtral-8x7B's in fp8. The limit of a step is
what it must read: all matrices but those of experts, these of the experts that so many rows choose
if all are as likely, and the cache. `--peer` measures vLLM beside it, in a process of that Python
with dummy weights of the same shape. `--count` needs no GPU: bytes alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import driving
import workloads
from limits import rates_of
from shapes import SHAPES, write_config

GOAL, PEER_GOAL = 0.6, 1.2
ROWS = (1, 32, 128)
NUM_OUTPUT = 128
CASES = {"qwen3-30b-a3b": "none", "mixtral-8x7b": "fp8"}  # shape -> quantization


@dataclass(frozen=True, slots=True)
class Bytes:
    """Gigabytes that a step reads."""

    dense: float
    experts: float
    cache: float

    @property
    def whole(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.cache


def bytes_of_step(name: str, rows: int, context: int) -> Bytes:
    """Count what a step reads with so many rows, `context` cached tokens each."""
    s, size = SHAPES[name], 1 if CASES[name] == "fp8" else 2
    hidden, layers, head = s["hidden_size"], s["num_hidden_layers"], s["head_dim"]
    count = s.get("num_experts", s.get("num_local_experts"))
    inner = s.get("moe_intermediate_size", s["intermediate_size"])
    queries, keys = s["num_attention_heads"] * head, s["num_key_value_heads"] * head
    attention = hidden * (2 * queries + 2 * keys) * size
    router, last = count * hidden * 2, s["vocab_size"] * hidden * 2  # never quantised
    distinct = count * (1 - (1 - s["num_experts_per_tok"] / count) ** rows)
    return Bytes(
        (layers * (attention + router) + last) / 1e9,
        layers * distinct * 3 * hidden * inner * size / 1e9,
        layers * 2 * keys * 2 * rows * context / 1e9,
    )


def workload(name: str, rows: int) -> workloads.Workload:
    """Return requests that decode together, of the shape's vocabulary."""
    found = workloads.decode(rows, max_tokens=NUM_OUTPUT)
    size = SHAPES[name]["vocab_size"]
    prompts = [[token % size for token in prompt] for prompt in found.prompts]
    return replace(found, prompts=prompts)


def timed(name: str, target: Any, repeat: int) -> dict[str, float]:
    """Milliseconds between tokens by rows, the median of runs behind a first."""
    found = {}
    for rows in ROWS:
        times = [driving.run(target, workload(name, rows)).itl_ms for _ in range(repeat + 1)]
        found[str(rows)] = statistics.median(t for t in times[1:] if t is not None)
    return found


def ours(name: str, repeat: int) -> dict[str, float]:
    """Time the engine."""
    from engine import EngineTarget, build

    options = {"quantization": CASES[name], "max_num_seqs": max(ROWS)}
    return timed(name, EngineTarget(build(name, "bfloat16", 4096, **options)), repeat)


def vllm(name: str, repeat: int) -> dict[str, float]:
    """Time vLLM, in this process."""
    from peer import PeerTarget
    from vllm import LLM

    options: dict[str, Any] = {"quantization": "fp8"} if CASES[name] == "fp8" else {}
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        write_config(name, Path(directory))
        llm = LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=max(ROWS),
            max_model_len=4096,
            enable_prefix_caching=False,
            generation_config="vllm",
            **options,
        )
        return timed(name, PeerTarget(llm), repeat)


def in_process(python: str, side: str, name: str, repeat: int) -> dict[str, float]:
    """Run a side in a process of its own, which has the GPU to itself."""
    command = [python, __file__, name, "--side", side, "--repeat", str(repeat)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def show(name: str, args: argparse.Namespace) -> None:
    """Print a line for each number of rows."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    mine = {} if args.count else in_process(sys.executable, "ours", name, args.repeat)
    other = in_process(args.peer, "vllm", name, args.repeat) if args.peer else {}
    for rows in ROWS:
        context = len(workload(name, rows).prompts[0]) + NUM_OUTPUT // 2  # half way
        read = bytes_of_step(name, rows, context)
        limit = read.whole * 1e9 / rates_of(gpu, {}).read * 1e3
        line = f"{name:14} {CASES[name]:5} {rows:4} {read.dense:6.2f} {read.experts:8.2f} "
        line += f"{read.cache:6.2f} {limit:8.2f}"
        if own := mine.get(str(rows)):
            line += f" {own:8.2f} {limit / own:6.1%}" + (" <" if limit / own < GOAL else "  ")
            if peer := other.get(str(rows)):
                line += f" {peer:8.2f} {peer / own:5.2f}" + (" <" if peer / own < PEER_GOAL else "")
        print(line, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer", help="a Python that has vLLM")
    parser.add_argument("--count", action="store_true", help="bytes alone")
    parser.add_argument("--side", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        (name,) = args.names
        print(json.dumps({"ours": ours, "vllm": vllm}[args.side](name, args.repeat)))
        return
    print(f"goals: {GOAL:.0%} of the limit, {PEER_GOAL} times vLLM; < is below. GB, ms a step")
    columns = "rows  dense  experts  cache    limit     ours  share     vLLM  ratio"
    print(f"{'shape':14} {'bits':5} {columns}")
    for name in args.names:
        show(name, args)


if __name__ == "__main__":
    main()
