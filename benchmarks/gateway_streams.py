"""What the gateway adds to streams: `python benchmarks/gateway_streams.py [--rows 256x100 ...]`.

`slipstream gateway` with `paced_engine.py` in the engine's place: every stream is owed one token a
step, and what is late was made late between the engine's socket and the client. The clients, in
processes of their own on the same machine, only note times and bytes while streams run. Each text
is compared with the one that was made, token for token. Figures are of the window in which all
streams run: the delay of each token, from its step to its arrival; the cores of the gateway's
process; its growth. Exit code 1: a text is wrong.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paced_engine import expected_bytes, write_python
from slipstream_runtime.processes import num_cores
from slipstream_serve.server import repository_root
from sse_clients import Ask, Load, Streamed, receive
from stream_figures import Journal, read_journal

_NS = 1_000_000_000
_OPENING_S = 3.0  # for the clients' imports, and for all to connect
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Served:
    """A running gateway."""

    pid: int
    host: str
    port: int


@contextlib.contextmanager
def serving(folder: Path, step_s: float) -> Iterator[tuple[Served, Path]]:
    """A gateway on a paced source, and the source's journal."""
    journal, python = folder / "journal", folder / "python"
    write_python(python, step_s, journal)
    command = [sys.executable, "-m", "slipstream_client.cli", "gateway", "--port", "0"]
    command += ["--model-repository", str(repository_root() / "model_repository")]
    environment = dict(os.environ) | {"SLIPSTREAM_PYTHON": str(python)}
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while not (found := re.search(r"http://(.+):(\d+)/", (folder / "log").read_text())):
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
            served = Served(process.pid, found[1], int(found[2]))
            _wait_ready(served)
            yield served, journal
        finally:
            process.terminate()
            process.wait(30)


def _wait_ready(served: Served) -> None:
    import urllib.error
    import urllib.request

    while True:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://{served.host}:{served.port}/health", timeout=5)
            return
        time.sleep(0.1)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run_row(folder: Path, streams: int, rate: int, seconds: float, clients: int) -> dict:
    """Figures of one row."""
    folder.mkdir()
    size = round(rate * (seconds + 2))
    with serving(folder, 1 / rate) as (served, journal):
        begin_ns = time.time_ns() + round(_OPENING_S * _NS)
        bodies = [
            {"prompt": "a", "stream": True, "max_tokens": size, "seed": 1 + i, "ignore_eos": True}
            for i in range(streams)
        ]
        asks = [Ask(0.5 * i / streams, json.dumps(body).encode()) for i, body in enumerate(bodies)]
        loads = [
            Load(served.host, served.port, "/v1/completions", asks[k::clients], begin_ns)
            for k in range(clients)
        ]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(clients, mp_context=context) as pool:
            futures = [pool.submit(receive, load) for load in loads]
            time.sleep(max(0.0, begin_ns / _NS + 2 - time.time()))
            before_s, before_mb, start_s = cpu_s(served.pid), resident_mb(served.pid), time.time()
            time.sleep(max(0.5, seconds - 2))
            cores = (cpu_s(served.pid) - before_s) / (time.time() - start_s)
            grown_mb = resident_mb(served.pid) - before_mb
            results = [future.result() for future in futures]
        found: dict[int, Streamed] = {}
        for k, (part, _) in enumerate(results):
            found |= {1 + k + clients * i: stream for i, stream in enumerate(part)}
        row = {"streams": streams, "rate": rate, "seconds": seconds}
        client_s = sum(seconds for _, seconds in results)
        return (
            row
            | judge(found, read_journal(journal), size)
            | {
                "gateway_cores": round(cores, 3),
                "grown_mb": round(grown_mb, 1),
                "clients_cpu_s": round(client_s, 1),
            }
        )


def judge(found: dict[int, Streamed], journal: Journal, size: int) -> dict:
    """Return faults, and the delays of tokens while all streams run, in ms."""
    faults = []
    begin = max(journal.first.values())
    end = min(journal.first[seed] for seed in found) + size
    delays, num_events = [], 0
    for seed, stream in found.items():
        text = "".join(stream.texts).encode()
        if stream.error or text != expected_bytes(seed, size):
            faults.append(f"stream {seed}: {stream.error or f'{len(text)} of {size} tokens'}")
            continue
        counts = [len(each) for each in stream.texts]
        steps = journal.first[seed] + np.arange(size)
        inside = (steps >= begin) & (steps < end)
        times = np.repeat(np.array(stream.times_ns, np.int64), counts)
        delays.append((times - journal.made_ns[steps])[inside] / 1e6)
        num_events += len(counts)
    every = np.concatenate(delays) if delays else np.zeros(1)
    halves = np.array_split(every, 2)
    made = (end - begin) / max(1, journal.made_ns[end - 1] - journal.made_ns[begin]) * _NS
    return {
        "faults": faults[:5],
        "made_tok_s": round(made * len(found)),
        "delay_p50_ms": round(float(np.percentile(every, 50)), 2),
        "delay_p99_ms": round(float(np.percentile(every, 99)), 2),
        "delay_max_ms": round(float(every.max()), 1),
        "p50_by_half_ms": [round(float(np.percentile(half, 50)), 2) for half in halves],
        "tokens_per_event": round(size * len(found) / max(1, num_events), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", nargs="+", default=["64x100", "256x100"], metavar="NxTOK_S")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=max(1, min(4, num_cores() // 2)))
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    print(f"{num_cores()} cores, {platform.processor() or platform.machine()}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, word in enumerate(options.rows):
            streams, rate = map(int, word.split("x"))
            where = Path(folder) / str(number)
            rows.append(run_row(where, streams, rate, options.seconds, options.clients))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
