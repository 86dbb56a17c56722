"""Decode steps of mixtures of experts: `python benchmarks/mixtures.py [NAME ...] [--peer PYTHON]`.

Weights are random: Qwen3-30B-A3B's shape in bf16, int4 by 128 and e4m3 by blocks, Mixtral-8x7B's in
fp8, gpt-oss-20b's in MXFP4; `--quantization` names those to run. The limit of a step is what it
must read as a file has it: all matrices but those of experts, of these what so many rows choose if
all are as likely, and the cache. `--peer` measures vLLM beside it, in a process of that Python with
dummy weights of the same shape, of what it can make: bf16 and fp8. `--count` needs no GPU: bytes
alone.
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
import packed_weights
import workloads
from limits import rates_of
from packed_weights import ALL, FORMS
from shapes import SHAPES, write_config

GOAL, PEER_GOAL = 0.6, 1.2
ROWS = (1, 32, 128)
NUM_OUTPUT = 128
CASES = {  # shape -> quantization
    "qwen3-30b-a3b": ("none", "int4", "fp8-blocks"),
    "mixtral-8x7b": ("fp8",),
    "gpt-oss-20b": ("mxfp4",),
}
PEERS = ("none", "fp8")  # that vLLM makes of dummy weights


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


def bytes_of_weight(scheme: str) -> tuple[float, float]:
    """Return the bytes of a weight of attention, and of experts, with its part of a scale."""
    if (form := FORMS.get(scheme)) is None:
        return (1, 1) if scheme == "fp8" else (2, 2)
    return (form.bits / 8 if form.names == ALL else 2), form.bits / 8


def bytes_of_step(name: str, scheme: str, rows: int, context: int) -> Bytes:
    """Count what a step reads with so many rows, `context` cached tokens each.

    A window is not counted: of gpt-oss, whose every second layer has one, the cache is too large.
    """
    s, (size, of_experts) = SHAPES[name], bytes_of_weight(scheme)
    hidden, layers, head = s["hidden_size"], s["num_hidden_layers"], s["head_dim"]
    count = s.get("num_experts", s.get("num_local_experts"))
    inner = s.get("moe_intermediate_size", s["intermediate_size"])
    queries, keys = s["num_attention_heads"] * head, s["num_key_value_heads"] * head
    attention = hidden * (2 * queries + 2 * keys) * size
    router, last = count * hidden * 2, s["vocab_size"] * hidden * 2  # never quantised
    distinct = count * (1 - (1 - s["num_experts_per_tok"] / count) ** rows)
    return Bytes(
        (layers * (attention + router) + last) / 1e9,
        layers * distinct * 3 * hidden * inner * of_experts / 1e9,
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


def ours(name: str, scheme: str, repeat: int) -> dict[str, float]:
    """Time the engine."""
    from engine import EngineTarget, build

    options = {"quantization": packed_weights.settled(scheme), "max_num_seqs": max(ROWS)}
    return timed(name, EngineTarget(build(name, "bfloat16", 4096, **options)), repeat)


def vllm(name: str, scheme: str, repeat: int) -> dict[str, float]:
    """Time vLLM, in this process."""
    from peer import PeerTarget
    from vllm import LLM

    options: dict[str, Any] = {"quantization": "fp8"} if scheme == "fp8" else {}
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


def in_process(python: str, side: str, name: str, scheme: str, repeat: int) -> dict[str, float]:
    """Run a side in a process of its own, which has the GPU to itself."""
    command = [python, __file__, name, "--quantization", scheme]
    command += ["--side", side, "--repeat", str(repeat)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def show(name: str, scheme: str, args: argparse.Namespace) -> None:
    """Print a line for each number of rows."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    mine = {} if args.count else in_process(sys.executable, "ours", name, scheme, args.repeat)
    has_peer = args.peer and scheme in PEERS
    other = in_process(args.peer, "vllm", name, scheme, args.repeat) if has_peer else {}
    for rows in ROWS:
        context = len(workload(name, rows).prompts[0]) + NUM_OUTPUT // 2  # half way
        read = bytes_of_step(name, scheme, rows, context)
        limit = read.whole * 1e9 / rates_of(gpu, {}).read * 1e3
        line = f"{name:14} {scheme:10} {rows:4} {read.dense:6.2f} {read.experts:8.2f} "
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
    schemes = sorted({each for found in CASES.values() for each in found})
    parser.add_argument("--quantization", nargs="*", choices=schemes, help="default: all")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer", help="a Python that has vLLM")
    parser.add_argument("--count", action="store_true", help="bytes alone")
    parser.add_argument("--side", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        (name,), (scheme,) = args.names, args.quantization
        print(json.dumps({"ours": ours, "vllm": vllm}[args.side](name, scheme, args.repeat)))
        return
    if not args.count:
        from timing import need_gpu

        need_gpu()
    print(f"goals: {GOAL:.0%} of the limit, {PEER_GOAL} times vLLM; < is below. GB, ms a step")
    columns = "rows  dense  experts  cache    limit     ours  share     vLLM  ratio"
    print(f"{'shape':14} {'bits':10} {columns}")
    for name in args.names:
        for scheme in CASES[name]:
            if not args.quantization or scheme in args.quantization:
                show(name, scheme, args)


if __name__ == "__main__":
    main()
