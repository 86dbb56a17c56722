"""The real engine through `/v1/completions` beside the engine alone, and beside `vllm serve`.

The mixed workload of `through_triton.py` (512 prompts of 128 to 1,024 tokens, 256 tokens each, at
most 256 running) is given to the engine in a process of its own; then, as text over HTTP, streamed,
by clients in processes of their own, to `slipstream gateway` with the same engine; then, with
`--peer DIR` (a folder of packages with vLLM), to `vllm serve` on the same checkpoint, by the same
clients. Each server is given all requests at once, then half the rate that it reached, then one
short prompt after another.

    python benchmarks/through_gateway.py --peer /tmp/site       # Llama-3.1-8B's shape, a GPU
    python benchmarks/through_gateway.py --shape tiny --requests 16 --max-tokens 32 --input 8 64
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import through_triton
from report import RESULTS, commit
from shapes import SHAPES
from sse_clients import Ask, Load, Streamed, receive

GOAL = 97.0  # percent of the engine alone
OUT = through_triton.OUT
_NS = 1_000_000_000
_OPENING_S = 2.0  # for the clients' imports
_START_S = 300.0
_FIRST_TOKENS = 40  # requests one after another
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Server:
    """A server that is measured."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    port: int
    model: str


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ours(repository: Path, model: str) -> Server:
    """`slipstream gateway` with an engine of its own."""
    port = free_port()
    command = [sys.executable, "-m", "slipstream_client.cli", "gateway", "--port", str(port)]
    return Server("slipstream", [*command, "--model-repository", str(repository)], {}, port, model)


def peer(args: argparse.Namespace, checkpoint: Path) -> Server:
    """`vllm serve` on the same checkpoint, its weights random."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", "model", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--load-format", "dummy", "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(args.running), "--max-model-len", "4096"]
    command += ["--max-num-batched-tokens", str(args.peer_tokens)]
    return Server("vllm", command, {"PYTHONPATH": str(args.peer), **_OFFLINE}, port, "model")


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    """Start a server, and return once it says that it is ready. Raises SystemExit."""
    OUT.mkdir(parents=True, exist_ok=True)
    log = OUT / f"through-gateway-{server.name}.log"
    with log.open("wb") as sink:
        environment = {**os.environ, **server.environment}
        process = subprocess.Popen(
            server.command, env=environment, stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            _wait(server, process, log)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        url = f"http://127.0.0.1:{server.port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"{server.name} did not start:\n{log.read_text(errors='replace')[-4000:]}")


def body(server: Server, prompt: str, max_tokens: int) -> bytes:
    """Return a request for exactly `max_tokens` tokens."""
    return json.dumps(
        {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def send(pool: ProcessPoolExecutor, num: int, server: Server, asks: list[Ask]) -> list[Streamed]:
    """Send requests from `num` processes. Raises SystemExit for a stream that fails."""
    begin_ns = time.time_ns() + round(_OPENING_S * _NS)
    loads = [
        Load("127.0.0.1", server.port, "/v1/completions", asks[number::num], begin_ns)
        for number in range(num)
        if asks[number::num]
    ]
    found = [stream for part in pool.map(receive, loads) for stream in part[0]]
    failed = [stream.error for stream in found if stream.error]
    if failed:
        raise SystemExit(f"{server.name}: {len(failed)} streams failed: {failed[0]}")
    return found


def figures(streams: Sequence[Streamed]) -> dict[str, float]:
    """Return rates, and percentiles of the first token and of the time between events, in ms."""
    num_tokens = sum(stream.num_tokens for stream in streams)
    end_ns = max(stream.times_ns[-1] for stream in streams)
    seconds = (end_ns - min(stream.opened_ns for stream in streams)) / _NS
    first = [(stream.times_ns[0] - stream.opened_ns) / 1e6 for stream in streams]
    gaps = [
        (after - before) / 1e6
        for stream in streams
        for before, after in zip(stream.times_ns, stream.times_ns[1:], strict=False)
    ]
    found = {"tok_s": num_tokens / seconds, "requests_s": len(streams) / seconds}
    for name, values in (("first_token_ms", first), ("between_ms", gaps)):
        if len(values) > 1:
            cuts = statistics.quantiles(values, n=100)
            found |= {f"{name}_p50": cuts[49], f"{name}_p99": cuts[98]}
    return {name: round(value, 2) for name, value in found.items()}


def one_after_another(
    pool: ProcessPoolExecutor, server: Server, text: str, count: int
) -> list[Streamed]:
    """Send a short prompt `count` times, each when the one before has ended."""
    return [send_one(pool, server, body(server, text, 2)) for _ in range(count)]


def send_one(pool: ProcessPoolExecutor, server: Server, data: bytes) -> Streamed:
    """Send one request now."""
    load = Load("127.0.0.1", server.port, "/v1/completions", [Ask(0.0, data)], time.time_ns())
    (stream,), _ = pool.submit(receive, load).result()
    if stream.error:
        raise SystemExit(f"{server.name}: {stream.error}")
    return stream


_BENCH = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")


def bench_serve(args: argparse.Namespace, server: Server, checkpoint: Path) -> dict[str, Any]:
    """Return what `vllm bench serve` measures: random prompts of the middle length."""
    length = sum(args.input) // 2
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--backend", "openai", "--base-url", f"http://127.0.0.1:{server.port}"]
        command += ["--endpoint", "/v1/completions", "--model", server.model]
        command += ["--tokenizer", str(checkpoint), "--dataset-name", "random", "--ignore-eos"]
        command += ["--random-input-len", str(length), "--random-output-len", str(args.max_tokens)]
        command += ["--num-prompts", str(args.requests), "--max-concurrency", str(args.running)]
        command += ["--save-result", "--result-dir", scratch, "--result-filename", "found.json"]
        environment = {**os.environ, "PYTHONPATH": str(args.peer), **_OFFLINE}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_START_S
        )
        path = Path(scratch, "found.json")
        if not path.is_file():
            return {"failed": done.stderr[-1000:]}
        found = json.loads(path.read_bytes())
        return {name: found.get(name) for name in _BENCH}


def measure_server(
    pool: ProcessPoolExecutor, args: argparse.Namespace, server: Server, texts: Sequence[str]
) -> dict[str, Any]:
    """All at once, at half the rate, and one after another."""
    asks = [Ask(0.0, body(server, text, args.max_tokens)) for text in texts]
    send(pool, args.clients, server, asks)  # a warm-up
    full = [figures(send(pool, args.clients, server, asks)) for _ in range(args.repeat)]
    rate = statistics.median(each["requests_s"] for each in full) / 2
    rng, at, spread = random.Random(0), 0.0, []
    for ask in asks[: args.half]:
        spread.append(Ask(at, ask.body))
        at += rng.expovariate(rate)
    half = figures(send(pool, args.clients, server, spread))
    short = " ".join(texts[0].split()[:128])
    first = one_after_another(pool, server, short, _FIRST_TOKENS)[5:]
    found = {"full": full, "half": {"asked_requests_s": round(rate, 2), **half}}
    found["one_stream"] = figures(first)
    print(server.name, json.dumps(found), flush=True)
    return found


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the engine alone, the gateway and the peer."""
    checkpoint = (args.directory or scratch / "checkpoint").resolve()
    if args.checkpoint:
        checkpoint = args.checkpoint.resolve()
    else:
        through_triton.make_checkpoint(args.shape, checkpoint)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(about))
    settings = through_triton.compose(args, checkpoint, scratch / "models")
    texts, workload = through_triton.draw(args, checkpoint)
    (scratch / "workload.json").write_bytes(msgspec.json.encode(workload))
    alone = through_triton.alone(settings, scratch / "workload.json", args.repeat)
    print("alone", json.dumps(alone), flush=True)
    found: dict[str, Any] = {"alone_tok_s": alone}
    servers = [ours(scratch / "models", "ensemble")]
    servers += [peer(args, checkpoint)] if args.peer else []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.clients, spawn) as pool:
        for server in servers:
            with running(server):
                found[server.name] = measure_server(pool, args, server, texts)
                if args.peer:
                    found[server.name]["bench_serve"] = bench_serve(args, server, checkpoint)
                    print(server.name, json.dumps(found[server.name]["bench_serve"]), flush=True)
    through = statistics.median(each["tok_s"] for each in found["slipstream"]["full"])
    found["share_of_alone"] = round(100 * through / statistics.median(alone), 2)
    return found


def main() -> int:
    """Command line; not 0 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--checkpoint", type=Path, help="instead of a shape with random weights")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--directory", type=Path, help="of that shape's checkpoint; it is kept")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--half", type=int, default=256, help="requests at half the rate")
    parser.add_argument("--running", type=int, default=256, help="at most so many at once")
    parser.add_argument("--input", type=int, nargs=2, default=(128, 1024), metavar="N")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--peer", type=Path, help="a folder of packages with vLLM")
    parser.add_argument("--peer-tokens", type=int, default=8192, help="its tokens a step")
    parser.add_argument("--repeat", type=int, default=2)
    clients = max(1, min(4, (os.cpu_count() or 1) // 4))
    parser.add_argument("--clients", type=int, default=clients, help="processes (%(default)s)")
    parser.add_argument("--name", help="keep the result in benchmarks/results/ under this name")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-gateway-") as scratch:
        found = measure(args, Path(scratch))
    about = {name: str(value) for name, value in vars(args).items() if value is not None}
    about |= {"commit": commit(), "cores": str(os.cpu_count())}
    result = {"about": about, "date": time.strftime("%Y-%m-%d"), "goal": GOAL} | found
    OUT.mkdir(parents=True, exist_ok=True)
    for path in [
        OUT / "through-gateway.json",
        *([RESULTS / f"{args.name}.json"] * bool(args.name)),
    ]:
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{found['share_of_alone']} % of the engine alone, goal {GOAL:g}")
    print(json.dumps(result))
    return 0 if found["share_of_alone"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
