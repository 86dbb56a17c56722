"""Measure a model on N ranks: `python benchmarks/tensor_parallel.py --tensor-parallel N`.

With `--pipeline-parallel M` there are M stages of N ranks; then no sums are timed by themselves.

Sums over ranks by size, checked bit for bit, beside NCCL, torch's symmetric memory and what the
link alone takes; decode, prompts and many requests at once, beside one rank and vLLM where it can
be imported; the share of time in which each GPU had no step; and a rank that is killed, with the
time to the next token. Weights are random, made on the device. Ends with one JSON line. On CPUs
(`--device cpu`) the same runs with a tiny shape, and sums stand beside gloo's.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from shapes import write_config
from slipstream.config import EngineConfig
from slipstream.launch import die_with_parent
from slipstream_runtime.ranks import RankMemory
from step import can_import_peer, peer_environment

HERE = Path(__file__).parent
SIZES = [8 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 8 << 20]
ENVIRONMENT = {  # unless the operator's says otherwise: nothing here needs multicast
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
PARTS = ("sums", "engine", "one", "kill", "peer")


class Model(NamedTuple):
    """A shape in a precision."""

    shape: str
    quantization: str = "none"


MODELS = {
    "8b": Model("llama-3.1-8b"),
    "70b-fp8": Model("llama-3.3-70b", "fp8"),
    "70b": Model("llama-3.3-70b"),
    "tiny": Model("tiny"),
}


class Ranks:
    """The processes of a measurement; all are killed when one ends badly, or is late."""

    def __init__(self, args: argparse.Namespace, what: str, size: int, config: Path) -> None:
        self.descriptor = RankMemory.create(size)
        self.outputs = [config.with_suffix(f".{what}.{rank}") for rank in range(size)]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            output.unlink(missing_ok=True)
            command = [
                *(sys.executable, str(HERE / "tensor_parallel_rank.py"), what),
                *("--config", str(config), "--output", str(output), "--device", args.device),
                *("--rank", str(rank), "--size", str(size), "--ranks", str(self.descriptor)),
                *("--tokens", str(args.tokens), "--prompt", str(args.prompt)),
                *("--requests", str(args.requests)),
                *("--batches", *map(str, args.batches), "--sizes", *map(str, args.sizes)),
            ]
            pipe = subprocess.PIPE if rank == 0 else None
            # Unbuffered: `wait_ready` waits for the descriptor between lines.
            given = {"stdout": pipe, "bufsize": 0, "env": ENVIRONMENT | dict(os.environ)}
            given["preexec_fn"] = die_with_parent()  # a rank may serve for ever
            self.processes.append(subprocess.Popen(command, pass_fds=[self.descriptor], **given))

    def wait(self, seconds: float) -> list[Any] | str:
        """Return what each rank has measured, or why there is nothing."""
        end_s = time.monotonic() + seconds
        while True:
            codes = [each.poll() for each in self.processes]
            bad = [rank for rank, code in enumerate(codes) if code not in (0, None)]
            if bad:
                return f"rank {bad[0]} failed"
            if None not in codes:
                break
            if time.monotonic() > end_s:
                return f"not done after {seconds:g} s"
            time.sleep(0.05)
        if not all(path.is_file() for path in self.outputs):
            return "a rank has measured nothing"
        return [json.loads(path.read_text()) for path in self.outputs]

    def wait_ready(self, seconds: float) -> bool:
        """Wait until rank 0 has made its first token."""
        out = self.processes[0].stdout
        assert out is not None
        end_s = time.monotonic() + seconds
        while (left := end_s - time.monotonic()) > 0:
            if not select.select([out], [], [], left)[0]:
                return False
            line = out.readline()
            if line.strip() == b"ready":
                return True
            if not line:
                return False
        return False

    def end(self) -> None:
        """Kill all that still run."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        os.close(self.descriptor)


@contextlib.contextmanager
def ranks_of(args: argparse.Namespace, what: str, size: int, config: Path) -> Iterator[Ranks]:
    """Processes that are gone behind the block."""
    made = Ranks(args, what, size, config)
    try:
        yield made
    finally:
        made.end()


def write(args: argparse.Namespace, name: str, folder: Path, size: int) -> Path:
    """Write the configuration of a model on one rank, or on all; return its file."""
    model, checkpoint = MODELS[name], folder / name
    longest = max(256, args.prompt // 2) + args.tokens
    write_config(model.shape, checkpoint)
    config = EngineConfig(
        checkpoint=str(checkpoint),
        device=args.device,
        load_format="random",
        quantization=model.quantization,
        tensor_parallel=args.tensor_parallel if size > 1 else 1,
        pipeline_parallel=args.pipeline_parallel if size > 1 else 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=max(args.batches),
        kv_cache_tokens=max(args.batches) * longest + 8 * args.prompt,
        kv_cache_reuse=False,
        stuck_after_s=60,
    )
    path = folder / f"{name}-{size}.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


def kill_one(args: argparse.Namespace, size: int, config: Path) -> dict[str, Any] | str:
    """Kill the last rank under load, start all again as the supervisor does; time both."""
    with ranks_of(args, "serve", size, config) as ranks:
        if not ranks.wait_ready(args.limit):
            return "not ready in time"
        time.sleep(0.5)
        ended = os.pidfd_open(ranks.processes[-1].pid)
        begin = time.perf_counter()
        ranks.processes[-1].send_signal(signal.SIGKILL)
        select.select([ended], [], [], 10)
        os.close(ended)
        ranks.end()
        ranks.descriptor = RankMemory.create(size)  # closed once more behind the block
        gone_s = time.perf_counter() - begin
        with ranks_of(args, "serve", size, config) as again:
            if not again.wait_ready(args.limit):
                return "not ready in time after a rank was killed"
            token_s = time.perf_counter() - begin
    return {"all_gone_s": round(gone_s, 3), "next_token_s": round(token_s, 2)}


def measure_peer(args: argparse.Namespace, name: str, folder: Path) -> dict[str, Any] | str | None:
    """Run vLLM on as many GPUs; None: it is not there."""
    environment = ENVIRONMENT | peer_environment(args.peer_path)
    if args.device == "cpu" or not can_import_peer(environment):
        return None
    output = folder / f"{name}.peer"
    batches = map(str, args.batches)
    command = [
        *(sys.executable, str(HERE / "tensor_parallel_peer.py"), str(folder / name), str(output)),
        *("--tensor-parallel", str(args.tensor_parallel), "--tokens", str(args.tokens)),
        *("--pipeline-parallel", str(args.pipeline_parallel)),
        *("--prompt", str(args.prompt), "--requests", str(args.requests)),
        *("--batches", *batches),
        *(["--fp8"] if MODELS[name].quantization == "fp8" else []),
    ]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, check=False, timeout=args.limit)
    return json.loads(output.read_text()) if output.is_file() else "vLLM failed"


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all parts, in their order; a part that fails says so, and the next goes on."""
    size, found = args.tensor_parallel * args.pipeline_parallel, {}
    first = write(args, args.models[0], folder, size)
    if "sums" in args.parts and args.pipeline_parallel == 1:
        with ranks_of(args, "sums", size, first) as ranks:
            found["sums"] = ranks.wait(args.limit)
        print(json.dumps({"sums": found["sums"]}), flush=True)
    for name in args.models:
        row: dict[str, Any] = {}
        for part, count in (("engine", size), ("one", 1)):
            if part in args.parts and not (part == "one" and name.startswith("70b")):
                config = write(args, name, folder, count)
                with ranks_of(args, "engine", count, config) as ranks:
                    row[part] = ranks.wait(args.limit)
                print(json.dumps({name: {part: row[part]}}), flush=True)
        if "peer" in args.parts and (peer := measure_peer(args, name, folder)) is not None:
            row["peer"] = peer
        found[name] = row
    if "kill" in args.parts:
        found["kill"] = kill_one(args, size, first)
    return found


def has_failed(found: Any) -> bool:
    """Whether a part has a reason in place of figures, or a sum other bits than it should."""
    if isinstance(found, dict):
        return found.get("is_right") is False or any(map(has_failed, found.values()))
    return any(map(has_failed, found)) if isinstance(found, list) else isinstance(found, str)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="M")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: 8b 70b-fp8, or tiny")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batches", nargs="+", type=int, help="default: 1 32 128, or 1 4")
    parser.add_argument("--tokens", type=int, help="of an answer (default: 128, or 8)")
    parser.add_argument("--prompt", type=int, help="tokens of a long one (default: 2048, or 64)")
    parser.add_argument("--requests", type=int, default=512, help="at once (%(default)d)")
    parser.add_argument("--sizes", nargs="+", type=int, help="bytes of sums")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=150.0, help="s that a part may take")
    parser.add_argument("--peer-path", help="where vLLM's packages lie, if not on the path")
    args = parser.parse_args()
    if args.tensor_parallel * args.pipeline_parallel < 2:
        parser.error("one rank alone: --tensor-parallel or --pipeline-parallel is to be above 1")
    is_cpu = args.device == "cpu"
    args.models = args.models or (["tiny"] if is_cpu else ["8b", "70b-fp8"])
    args.batches = args.batches or ([1, 4] if is_cpu else [1, 32, 128])
    args.tokens = args.tokens or (8 if is_cpu else 128)
    args.prompt = args.prompt or (64 if is_cpu else 2048)
    args.sizes = args.sizes or SIZES
    return args


def main() -> int:
    """Return the exit code."""
    args = parse()
    size = args.tensor_parallel * args.pipeline_parallel
    if args.device == "cuda" and torch.cuda.device_count() < size:
        seen = torch.cuda.device_count()
        print(f"bench-gpu: {size} ranks, but torch sees {seen} GPUs", file=sys.stderr)
        return 2
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        found = measure(args, Path(folder))
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    head: dict[str, Any] = {"tensor_parallel": args.tensor_parallel, "device": gpu}
    head |= {"pipeline_parallel": args.pipeline_parallel}
    head |= {"seconds": round(time.perf_counter() - began)}
    print(json.dumps(head | found))
    return int(has_failed(found))


if __name__ == "__main__":
    sys.exit(main())
