"""The real engine through Triton as a share of the engine alone: `through_triton.py`.

The mixed workload (512 prompts of 128 to 1,024 tokens, 256 tokens each, all offered at once, at
most 256 running) is given to the engine in a process of its own, and then, as text over gRPC by
clients in processes of their own, to a tritonserver with the same engine. Both wirings, in turn.

    python benchmarks/through_triton.py                          # Llama-3.1-8B's shape, an H200
    python benchmarks/through_triton.py --shape tiny --requests 16 --max-tokens 32 --input 8 64

Weights are noise (16 GB are written) and the tokenizer has a word for every token id, so that
prompts have the lengths that were drawn; `--checkpoint DIR` takes a real one instead, whose prompts
only come near them. A rate is all generated tokens over the time from the first request to the last
token, at the client.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from make_checkpoint import make as make_checkpoint_of_noise
from report import RESULTS, commit
from shapes import SHAPES
from slipstream_preprocessing.encode import Encoder
from slipstream_serve.server import repository_root
from slipstream_serve.triton import Endpoints, TritonServer
from stream_clients import Load, Prompt, receive
from tokenizers import Tokenizer, models, pre_tokenizers
from workloads import Workload

MODELS = {"fused": "tensorrt_llm_bls", "composed": "ensemble"}
GOALS = {"fused": 97.0, "composed": 95.0}  # percent
OUT = repository_root() / "benchmarks" / "out"
_OPENING_S = 5.0  # for the clients' imports and requests
_NS = 1_000_000_000


def make_checkpoint(shape: str, directory: Path) -> None:
    """Weights of noise, and a tokenizer whose token i is the word wi."""
    make_checkpoint_of_noise(shape, directory)
    words = {f"w{token_id}": token_id for token_id in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def draw(args: argparse.Namespace, checkpoint: Path) -> tuple[list[str], Workload]:
    """The prompts as text, and as the token ids that they are to the engine."""
    rng, encoder = np.random.default_rng(0), Encoder.load(checkpoint)
    least, most = args.input
    lengths = rng.integers(least, most + 1, args.requests)
    special = list(encoder.vocab.special)
    known = np.setdiff1d(np.arange(encoder.vocab.size), special)
    drawn = [rng.choice(known, length).tolist() for length in lengths]
    if args.checkpoint is None:
        texts = [" ".join(f"w{token_id}" for token_id in ids) for ids in drawn]
    else:
        texts = [encoder.tokenizer.decode(ids) for ids in drawn]
    return texts, Workload("mixed", [encoder.encode(text) for text in texts], args.max_tokens)


def compose(args: argparse.Namespace, checkpoint: Path, repository: Path) -> Path:
    """A repository of the engine that is measured; the path of its configuration."""
    command = [sys.executable, "-m", "slipstream_client.cli", "compose"]
    command += ["--checkpoint", str(checkpoint), "--output", str(repository)]
    command += ["--max-num-seqs", str(args.running)]
    command += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    command += ["--no-kv-cache-reuse"]  # the same prompts come again
    subprocess.run(command, check=True)
    path = repository / "tensorrt_llm" / "1" / "model.json"
    settings = json.loads(path.read_text())
    settings["engine"]["checkpoint"] = str(checkpoint)
    path.write_text(json.dumps(settings))
    return path


def alone(settings: Path, workload: Path, repeat: int) -> list[float]:
    """Output tokens a second of the engine in a process of its own, after a warm-up."""
    command = [sys.executable, __file__, "--alone", str(settings), str(workload)]
    command += ["--repeat", str(repeat)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def run_alone(settings: Path, workload: Path, repeat: int) -> None:
    """What that process does."""
    import driving
    from engine import EngineTarget
    from slipstream.config import EngineConfig
    from slipstream.engine.engine import Engine
    from slipstream.engine.scheduler import Limits
    from slipstream.runner.model_runner import ModelRunner
    from slipstream.runner.plan import resolve

    config = msgspec.json.decode(
        json.dumps(json.loads(settings.read_text())["engine"]), type=EngineConfig
    )
    load = msgspec.json.decode(workload.read_bytes(), type=Workload)
    plan = resolve(config)
    limits = Limits(
        plan.max_num_seqs,
        plan.max_num_batched_tokens,
        config.max_waiting,
        kv_cache_reuse=config.kv_cache_reuse,
    )
    target = EngineTarget(Engine(limits, ModelRunner(plan), None, plan.model_name))
    rates = [driving.run(target, load).output_tok_s for _ in range(repeat + 1)]
    print(json.dumps(rates[1:]))


@contextlib.contextmanager
def serving(repository: Path) -> Iterator[TritonServer]:
    """A server on it, once its engine is ready."""
    log = OUT / "through-triton-server.log"
    with TritonServer(repository, Endpoints.free(), log).running(timeout_s=600) as server:
        yield server


def rate(pool: ProcessPoolExecutor, num_clients: int, load: Load) -> float:
    """Output tokens a second at the clients. Raises SystemExit for a stream that fails."""
    begin_ns = time.time_ns() + round(_OPENING_S * _NS)
    parts = [load.slots[number::num_clients] for number in range(num_clients)]
    loads = [
        Load(load.address, load.model, part, begin_ns, load.timeout_s, True, load.is_greedy)
        for part in parts
    ]
    running = [pool.submit(receive, each) for each in loads]
    streams = [stream for each in running for stream in each.result()[0]]
    wanted = {prompt.seed: prompt.max_tokens for slot in load.slots for prompt in slot}
    for stream in streams:
        if stream.error or stream.counts.sum() != wanted[stream.seed]:
            raise SystemExit(f"stream {stream.seed}: {stream.counts.sum()} tokens, {stream.error}")
    seconds = max(stream.times_ns[-1] for stream in streams) - min(s.opened_ns for s in streams)
    return float(sum(wanted.values()) / (seconds / _NS))


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Alone, and through both wirings."""
    checkpoint = args.checkpoint
    if checkpoint is None:
        checkpoint = args.directory or scratch / "checkpoint"
        make_checkpoint(args.shape, checkpoint)
    checkpoint = checkpoint.resolve()
    settings = compose(args, checkpoint, scratch / "models")
    texts, workload = draw(args, checkpoint)
    (scratch / "workload.json").write_bytes(msgspec.json.encode(workload))
    found: dict[str, Any] = {"alone": alone(settings, scratch / "workload.json", args.repeat)}
    print(f"alone: {_shown(found['alone'])} tok/s", flush=True)
    found |= {wiring: [] for wiring in args.wirings}
    spawn = multiprocessing.get_context("spawn")
    slots = [[Prompt(n, text, args.max_tokens)] for n, text in enumerate(texts)]
    with (
        serving(scratch / "models") as server,
        ProcessPoolExecutor(args.clients, spawn) as pool,
    ):
        for turn in range(args.repeat + 1):
            for wiring in args.wirings:
                about = (server.endpoints.grpc, MODELS[wiring])
                load = Load(*about, slots, 0, args.timeout, True, is_greedy=True)
                reached = rate(pool, args.clients, load)
                if turn:  # the first is a warm-up
                    found[wiring].append(reached)
    num_input = sum(map(len, workload.prompts))
    return {"input_tokens": num_input, "output_tok_s": found} | judge(found)


def judge(found: dict[str, list[float]]) -> dict[str, Any]:
    """Percent of what the engine reaches alone, by the medians, and whether that is the goal."""
    alone = statistics.median(found["alone"])
    shares = {
        wiring: round(100 * statistics.median(values) / alone, 2)
        for wiring, values in found.items()
        if wiring != "alone"
    }
    reached = {wiring: share >= GOALS[wiring] for wiring, share in shares.items()}
    return {"share": shares, "goal": GOALS, "is_reached": reached}


def _shown(rates: list[float]) -> str:
    return " ".join(f"{value:,.0f}" for value in rates)


def main() -> int:
    """Command line; not 0 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--checkpoint", type=Path, help="instead of a shape with random weights")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--directory", type=Path, help="of that shape's checkpoint; it is kept")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--running", type=int, default=256, help="at most so many at once")
    parser.add_argument("--input", type=int, nargs=2, default=(128, 1024), metavar="N")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--wirings", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a request")
    clients = max(1, min(8, (os.cpu_count() or 1) // 4))
    parser.add_argument("--clients", type=int, default=clients, help="processes (%(default)s)")
    parser.add_argument("--name", help="keep the result in benchmarks/results/ under this name")
    parser.add_argument("--alone", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        run_alone(*args.alone, args.repeat)
        return 0
    with tempfile.TemporaryDirectory(prefix="slipstream-through-") as scratch:
        found = measure(args, Path(scratch))
    about = {name: str(value) for name, value in vars(args).items() if value is not None}
    about |= {"commit": commit(), "cores": str(os.cpu_count()), "machine": platform.machine()}
    result = {"about": about, "date": time.strftime("%Y-%m-%d")} | found
    OUT.mkdir(parents=True, exist_ok=True)
    for path in [OUT / "through-triton.json", *([RESULTS / f"{args.name}.json"] * bool(args.name))]:
        path.write_text(json.dumps(result, indent=1) + "\n")
    for wiring, share in found["share"].items():
        rates = _shown(found["output_tok_s"][wiring])
        print(f"{wiring}: {rates} tok/s, {share} % of the engine alone, goal {GOALS[wiring]:g}")
    print(json.dumps(result))
    return 0 if all(found["is_reached"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
