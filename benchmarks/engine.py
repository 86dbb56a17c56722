"""The engine alone on the shared workloads: `python benchmarks/engine.py [--shape S] [NAME ...]`.

Weights are random, prompts are token ids, sampling is greedy.
Prints one JSON line per workload and writes them to `--output`. Times are wall clock around
`Engine.step`, the median over `--repeat` runs with the spread beside it.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import driving
import packed_weights
import torch
import workloads
from driving import Run
from shapes import SHAPES, write_config
from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from workloads import Workload

FIGURES = ("itl_ms", "ttft_ms", "seconds", "input_tok_s", "output_tok_s")
WORKLOADS = {
    "decode_1": lambda: workloads.decode(1),
    "decode_16": lambda: workloads.decode(16),
    "decode_32": lambda: workloads.decode(32),
    "decode_64": lambda: workloads.decode(64),
    "decode_128": lambda: workloads.decode(128),
    "decode_256": lambda: workloads.decode(256, max_tokens=128),
    "prefill": workloads.prefill,
    "mixed": workloads.mixed,
    "long_context": workloads.long_context,
}


class EngineTarget:
    """The engine as `driving` runs it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a greedy request."""
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.0)
        self._engine.submit(
            b"bench", wire.Submit(number, pack(prompt), sampling, time.monotonic_ns())
        )

    def step(self) -> tuple[int, int]:
        """One step of the engine."""
        outputs = self._engine.step().get(b"bench", [])
        num_finished = sum(entry.finished is not None for entry in outputs)
        return sum(len(entry.token_ids) for entry in outputs), num_finished


def run(engine: Engine, workload: Workload) -> Run:
    """One run: submit everything, step until it is done."""
    return driving.run(EngineTarget(engine), workload)


def measure(engine: Engine, workload: Workload, repeat: int) -> dict[str, object]:
    """Median, minimum and maximum of every figure over `repeat` runs, after one warm-up."""
    run(engine, workload)
    runs = [run(engine, workload) for _ in range(repeat)]
    figures = {}
    for name in FIGURES:
        values = [getattr(r, name) for r in runs]
        if None not in values:
            figures[name] = {
                "median": round(statistics.median(values), 3),
                "min": round(min(values), 3),
                "max": round(max(values), 3),
            }
    return {"workload": workload.name, "requests": len(workload.prompts), **figures}


def build(
    shape: str,
    dtype: str,
    max_num_batched_tokens: int,
    checkpoint: str | None = None,
    **options: object,
) -> Engine:
    """An engine over random weights of the given shape, or over a checkpoint; `options` are of
    `EngineConfig`.

    Workloads are repeated: unless asked for, what is computed once is not found again.
    """
    options.setdefault("kv_cache_reuse", False)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        if checkpoint is None:
            write_config(shape, Path(directory))
        config = EngineConfig(
            checkpoint=checkpoint or directory,
            dtype=dtype,
            load_format="safetensors" if checkpoint else "random",
            max_num_batched_tokens=max_num_batched_tokens,
            **options,
        )
        runner = ModelRunner(resolve(config))
    limits = Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_waiting,
        kv_cache_reuse=config.kv_cache_reuse,
    )
    engine = Engine(limits, runner, None, shape)
    gc.collect()
    gc.freeze()  # as the engine's process does
    return engine


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--dtype", default="auto")
    schemes = ["none", "fp8", "int8", "int4", "w4a8", "w8a8", *packed_weights.FORMS]
    parser.add_argument("--quantization", default="none", choices=schemes, help="the last as files")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    options = {"quantization": packed_weights.settled(args.quantization)}
    engine = build(args.shape, args.dtype, args.max_num_batched_tokens, **options)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    head = {
        "engine": "slipstream",
        "shape": args.shape,
        "quantization": args.quantization,
        "device": device,
        "torch": torch.__version__,
    }
    rows: list[dict[str, object]] = [{**head, "start_s": round(time.perf_counter() - started, 1)}]
    print(json.dumps(rows[0]), flush=True)
    for name in args.names:
        rows.append(measure(engine, WORKLOADS[name](), args.repeat))
        print(json.dumps(rows[-1]), flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
