"""What the Triton side adds to a stream: `python benchmarks/streams.py [--rows 64x100 ...]`.

A real tritonserver on the default repository, with `paced_engine.py` in the engine's place: nothing
is computed, every stream is owed one token a step, and what a client gets late was made late
between the engine's socket and the client: bridge, Triton, and in the ensemble `postprocessing`.
The clients are processes of their own on the same machine; they only note times and bytes while
streams run, a gRPC connection for every 64 streams.

Delay is from a token's making to the client having its response. Figures are of the window in
which every stream runs. A row fails if a text is not the one that was made, token for token.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from paced_engine import expected_bytes, write_python
from slipstream_client.client import CHANNEL_OPTIONS, TRUE_STATUS
from slipstream_client.codec import chunks_of, request_of
from slipstream_compose.server import repository_root
from slipstream_compose.triton import Endpoints, TritonServer
from tritonclient.grpc import service_pb2

MODELS = {"fused": "tensorrt_llm_bls", "composed": "ensemble"}
ROWS = ("1x250", "64x100", "256x100", "1024x25")  # streams x tokens a second of each
COLUMNS = {
    "wiring": "wiring",
    "streams": "streams",
    "rate": "tok/s each",
    "made_tok_s": "made tok/s",
    "tok_s": "at clients",
    "resp_s": "resp/s",
    "tok_resp": "tok/resp",
    "p50_ms": "delay p50 ms",
    "p99_ms": "p99",
    "first_p50_ms": "first p50",
    "first_p99_ms": "p99",
    "is_growing": "grows",
    "server_cpu": "server cores",
    "stubs_cpu": "stubs",
    "source_cpu": "source",
    "client_cpu": "clients",
    "others_cpu": "others",
}
_WARM_SEED, _WARM_TOKENS = 1 << 20, 8  # of a first request that no figure counts
_OPENING_S = 3.0  # for the clients' imports, before they open their streams together
_STREAMS_PER_CHANNEL = 64
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_NS = 1_000_000_000


# --- a client's process --------------------------------------------------------------------------


@dataclass
class Received:
    """One stream as its client saw it."""

    seed: int
    opened_ns: int
    times_ns: list[int]  # of each response
    texts: list[bytes]
    error: str = ""


@dataclass(frozen=True)
class Load:
    """What a client's process does."""

    address: str
    model: str
    seeds: Sequence[int]
    max_tokens: int
    begin_ns: int
    timeout_s: float
    has_counts: bool  # ask for the number of tokens too, as the SDK does


_Raw = tuple[int, int, list[tuple[int, bytes]], str]  # seed, opened, responses, error


def receive(load: Load) -> tuple[list[_Raw], float]:
    """Open all streams at `begin_ns` and read them to their ends; also the CPU seconds of that."""
    time.sleep(max(0.0, (load.begin_ns - time.time_ns()) / _NS))
    gc.disable()
    begin_s = time.process_time()
    found = asyncio.run(_receive_all(load))
    return found, time.process_time() - begin_s


async def _receive_all(load: Load) -> list[_Raw]:
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for number, seed in enumerate(load.seeds):
            if number % _STREAMS_PER_CHANNEL == 0:
                new = grpc.aio.insecure_channel(load.address, options=options)
                channel = await stack.enter_async_context(new)
            tasks.append(_receive_one(channel, load, seed))
        return await asyncio.gather(*tasks)


async def _receive_one(channel: grpc.aio.Channel, load: Load, seed: int) -> _Raw:
    parameters = {
        "max_tokens": load.max_tokens,
        "seed": seed,
        "return_num_input_tokens": load.has_counts,
        "return_num_output_tokens": load.has_counts,
    }
    request = request_of(load.model, "def main():\n    ", parameters, "")
    responses: list[tuple[int, bytes]] = []
    method = channel.stream_stream(_METHOD, lambda message: message.SerializeToString(), None)
    opened_ns = time.time_ns()
    call = method(iter([request]), timeout=load.timeout_s, metadata=TRUE_STATUS)
    error = ""
    try:
        async for data in call:
            responses.append((time.time_ns(), data))
    except grpc.RpcError as failure:
        error = f"{failure.code().name}: {failure.details()}"
    return seed, opened_ns, responses, error


def parse(seed: int, opened_ns: int, responses: list[tuple[int, bytes]], error: str) -> Received:
    """A stream from what was noted of it."""
    received = Received(seed, opened_ns, [], [], error)
    for time_ns, data in responses:
        message = service_pb2.ModelStreamInferResponse.FromString(data)
        received.error = received.error or message.error_message
        received.times_ns.append(time_ns)
        received.texts.append(chunks_of(message.infer_response)[0].text.encode())
    return received


# --- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Journal:
    """What the source has made: the time of every step, and in which one a seed began."""

    made_ns: np.ndarray
    first: dict[int, int]


def read_journal(path: Path) -> Journal:
    """The source's journal."""
    rows = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
    first = {seed: step for step, row in enumerate(rows) for seed in row[1:]}
    return Journal(np.array([row[0] for row in rows], np.int64), first)


def fault(stream: Received, max_tokens: int) -> str:
    """What is wrong with a stream: an error, or a text other than the one made. Empty: nothing."""
    if stream.error:
        return f"stream {stream.seed}: {stream.error}"
    text, wanted = b"".join(stream.texts), expected_bytes(stream.seed, max_tokens)
    if text == wanted:
        return ""
    pairs = zip(text, wanted, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(wanted)))
    return f"stream {stream.seed}: {len(text)} of {max_tokens} tokens, the first {same} are right"


def figures(streams: list[Received], journal: Journal, max_tokens: int) -> dict[str, Any]:
    """Delays and rates of streams that are right, within the window in which all of them run."""
    begins = {stream.seed: journal.first[stream.seed] for stream in streams}
    begin, end = max(begins.values()), min(begins.values()) + max_tokens
    if end - begin < 4:
        raise ValueError(f"streams of {max_tokens} steps never ran all together long enough")
    made, delays, arrivals, firsts, waits = [], [], [], [], []
    for stream in streams:
        steps = np.arange(max_tokens) + begins[stream.seed]
        counts = [len(text) for text in stream.texts]
        arrival = np.repeat(np.array(stream.times_ns, np.int64), counts)
        delay = (arrival - journal.made_ns[steps]) / 1e6
        inside = (steps >= begin) & (steps < end)
        made.append(steps[inside])
        delays.append(delay[inside])
        firsts.append(delay[0])
        waits.append((arrival[0] - stream.opened_ns) / 1e6)
        arrivals += [t for t, count in zip(stream.times_ns, counts, strict=True) if count]
    steps, delay = np.concatenate(made), np.concatenate(delays)
    opened_ns, closed_ns = journal.made_ns[begin], journal.made_ns[end - 1]
    arrived = np.array(arrivals)
    num_responses = int(np.sum((arrived > opened_ns) & (arrived <= closed_ns)))
    num_arrived = int(np.sum(journal.made_ns[steps] + delay * 1e6 <= closed_ns))
    seconds = float(closed_ns - opened_ns) / _NS
    quarters = [float(np.median(part)) for part in _parts(delay, steps - begin, end - begin)]
    return {
        "seconds": round(seconds, 2),
        "made_tok_s": round(len(streams) * (end - 1 - begin) / seconds),
        "tok_s": round(num_arrived / seconds),
        "resp_s": round(num_responses / seconds),
        "tok_resp": round(num_arrived / max(1, num_responses), 2),
        **_percentiles("", delay),
        "max_ms": round(float(delay.max()), 2),
        **_percentiles("first_", firsts),  # of a stream's first token, from its making
        **_percentiles("open_", waits),  # of the same, from the stream's opening
        "quarters_ms": [round(quarter, 2) for quarter in quarters],  # medians, in order
        "is_growing": quarters == sorted(quarters) and quarters[-1] > 1.5 * quarters[0] + 5,
    }


def _parts(delay: np.ndarray, steps: np.ndarray, num_steps: int) -> list[np.ndarray]:
    """Delays by the quarter of the window in which their tokens were made."""
    quarter = steps * 4 // num_steps
    return [delay[quarter == number] for number in range(4)]


def _percentiles(name: str, values_ms: Any) -> dict[str, float]:
    return {f"{name}p{p}_ms": round(float(np.percentile(values_ms, p)), 2) for p in (50, 99)}


# --- a server and its rows -----------------------------------------------------------------------


@contextlib.contextmanager
def serving(step_s: float, journal: Path, log: Path) -> Iterator[TritonServer]:
    """The default repository with a source of that step."""
    python = journal.with_name("python")
    write_python(python, step_s, journal)
    os.environ["SLIPSTREAM_PYTHON"] = str(python)
    endpoints = Endpoints.free()
    server = TritonServer(repository_root() / "model_repository", endpoints, log)
    try:
        server.start()
        server.wait_ready(timeout_s=300)
        yield server
    finally:
        server.stop()
        del os.environ["SLIPSTREAM_PYTHON"]


def cpu_seconds(server: TritonServer) -> dict[str, float]:
    """CPU seconds so far: of tritonserver, of all stubs and each, the source, and the machine."""
    stubs = server.stubs()
    tick = os.sysconf("SC_CLK_TCK")
    lines = Path("/proc/stat").read_text().splitlines()
    idle, waiting = map(int, lines[0].split()[4:6])
    num_cores = sum(line.startswith("cpu") for line in lines) - 1
    found = {"machine": num_cores * time.monotonic() - (idle + waiting) / tick}
    found |= {"server": 0.0, "stubs": 0.0, "source": 0.0}
    for pid in server.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds = (int(words[11]) + int(words[12])) / tick
            if pid in stubs:
                found[stubs[pid]] = seconds
                found["stubs"] += seconds
            elif pid == server.pid:
                found["server"] = seconds
            elif b"slipstream.engine.loop" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found["source"] = seconds
    return found


def measure(wiring: str, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row on a server of its own. Raises SystemExit for the first streams that are wrong."""
    num_streams, rate = map(int, row.split("x"))
    max_tokens, out = round(args.seconds * rate), repository_root() / "benchmarks" / "out"
    spawn = multiprocessing.get_context("spawn")
    num_clients = min(args.clients, num_streams)
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-paced-") as directory,
        serving(1 / rate, Path(directory, "journal"), out / "streams-server.log") as server,
        ProcessPoolExecutor(num_clients, spawn) as pool,
    ):
        url, model = server.endpoints.grpc, MODELS[wiring]
        begin_ns = time.time_ns() + round(_OPENING_S * _NS)
        warm = Load(url, model, [_WARM_SEED], _WARM_TOKENS, 0, 60.0, args.counts)
        pool.submit(receive, warm).result()
        loads = [
            Load(
                *(url, model, range(n, num_streams, num_clients)),
                *(max_tokens, begin_ns, 4 * args.seconds + 60, args.counts),
            )
            for n in range(num_clients)
        ]
        running = [pool.submit(receive, load) for load in loads]
        time.sleep(max(0.0, (begin_ns - time.time_ns()) / _NS))
        before = cpu_seconds(server)
        results = [each.result() for each in running]
        after = cpu_seconds(server)
        journal = read_journal(Path(directory, "journal"))
    streams = [parse(*raw) for found, _ in results for raw in found]
    faults = [text for text in (fault(stream, max_tokens) for stream in streams) if text]
    if faults:
        raise SystemExit(f"{wiring} {row}: {len(faults)} wrong streams: " + "; ".join(faults[:3]))
    seconds = (max(stream.times_ns[-1] for stream in streams) - begin_ns) / _NS
    shares = {f"{name}_cpu": round((after[name] - before[name]) / seconds, 2) for name in after}
    shares["client_cpu"] = round(sum(cpu_s for _, cpu_s in results) / seconds, 2)
    known = sum(shares[f"{name}_cpu"] for name in ("server", "stubs", "source", "client"))
    shares["others_cpu"] = round(shares.pop("machine_cpu") - known, 2)
    about = {"wiring": wiring, "streams": num_streams, "rate": rate, "num_clients": num_clients}
    return about | figures(streams, journal, max_tokens) | shares


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; CPU in cores."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Command line; not 0 where a backlog grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="STREAMSxRATE")
    parser.add_argument("--wirings", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row (%(default)s)")
    clients = max(1, min(8, (os.cpu_count() or 1) // 4))
    parser.add_argument("--clients", type=int, default=clients, help="processes (%(default)s)")
    parser.add_argument("--counts", action="store_true", help="ask for token counts, as the SDK")
    args = parser.parse_args()
    output = repository_root() / "benchmarks" / "out" / "streams.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for wiring in args.wirings:
        for row in args.rows:
            rows.append(measure(wiring, row, args))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    commit = subprocess.run(
        ["git", "-C", str(repository_root()), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    about = {
        "commit": commit,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "seconds": args.seconds,
        "counts": args.counts,
    }
    output.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
    print(table(rows))
    print(json.dumps(about | {"rows": rows}))
    return 1 if any(row["is_growing"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
