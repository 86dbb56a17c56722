"""First tokens through the gateway beside gRPC: `python benchmarks/gateway_first_token.py`.

`slipstream serve` with the default model and its real engine. One stream at a time, the same prompt
and seed: by gRPC (`tensorrt_llm_bls`, streamed) and by `/v1/completions`, in turns, each on a
connection that is open already. A time is from sending the request to its first text.
"""

import argparse
import http.client
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import RESULTS, commit
from slipstream_client import SlipstreamClient
from slipstream_serve.server import repository_root
from through_gateway import free_port

GOAL_MS = 1.0  # beyond gRPC
_MODEL = "tensorrt_llm_bls"
_WARM = 20
_START_S = 240.0
_MAX_TOKENS = 2


def prompt(number: int) -> str:
    """Return a prompt whose blocks no other has cached."""
    return f"# {number}\ndef main():\n    "


def by_grpc(client: SlipstreamClient, number: int) -> float:
    """Return the milliseconds to a first text by gRPC."""
    begin_s = time.perf_counter()
    stream = client.stream(prompt(number), model=_MODEL, max_tokens=_MAX_TOKENS, seed=number)
    found = 0.0
    for chunk in stream:
        if chunk.text and not found:
            found = time.perf_counter() - begin_s
    return 1e3 * found


def by_http(connection: http.client.HTTPConnection, number: int) -> float:
    """Return the milliseconds to a first text by HTTP."""
    body = {"prompt": prompt(number), "max_tokens": _MAX_TOKENS, "seed": number, "stream": True}
    data = json.dumps(body)
    begin_s = time.perf_counter()
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = 0.0
    while line := response.readline():
        if line.startswith(b"data: {") and not found:
            if b'"text":""' in line:
                raise SystemExit(f"no text: {line!r}")
            found = time.perf_counter() - begin_s
    return 1e3 * found


def measure(grpc_port: int, port: int, count: int) -> dict[str, Any]:
    """Return medians and all times of `count` requests of each kind, in turns."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    times: dict[str, list[float]] = {"grpc": [], "http": []}
    with SlipstreamClient(f"127.0.0.1:{grpc_port}", timeout_s=60) as client:
        for number in range(-_WARM, count):
            first = number + 2 * _WARM
            pair = (by_grpc(client, 2 * first), by_http(connection, 2 * first + 1))
            if number >= 0:
                times["grpc"].append(pair[0])
                times["http"].append(pair[1])
    beyond = [http - grpc for grpc, http in zip(times["grpc"], times["http"], strict=True)]
    found: dict[str, Any] = {
        f"{name}_{label}_ms": round(value, 3)
        for name, values in times.items()
        for label, value in zip(("p25", "p50", "p75"), statistics.quantiles(values), strict=True)
    }
    found["beyond_p50_ms"] = round(found["http_p50_ms"] - found["grpc_p50_ms"], 3)
    found["median_of_differences_ms"] = round(statistics.median(beyond), 3)
    return found


def serve(scratch: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    """Start `slipstream serve` on these ports; return once it is ready. Raises SystemExit."""
    names = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")
    command = [sys.executable, "-m", "slipstream_client.cli", "serve"]
    command += ["--model-repository", str(repository_root() / "model_repository")]
    for name, port in zip(names, ports, strict=True):
        command += [name, str(port)]
    log = scratch / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if re.search(r"OpenAI\s+http://", log.read_text(errors="replace")):
            return process
        time.sleep(0.2)
    process.terminate()
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def main() -> int:
    """Command line; not 0 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=200, help="of each kind (%(default)s)")
    parser.add_argument("--name", help="keep the result in benchmarks/results/ under this name")
    args = parser.parse_args()
    ports = [free_port() for _ in range(4)]
    with tempfile.TemporaryDirectory(prefix="slipstream-first-") as directory:
        process = serve(Path(directory), ports)
        try:
            found = measure(ports[1], ports[3], args.requests)
        finally:
            process.terminate()
            process.wait(60)
    about = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    about |= {"machine": platform.machine(), "requests": args.requests, "goal_ms": GOAL_MS}
    result = about | {"load_average": os.getloadavg()[0]} | found
    if args.name:
        (RESULTS / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if found["beyond_p50_ms"] <= GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
