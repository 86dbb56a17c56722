"""Requests at once over replicas: `python benchmarks/replicas_served.py [--replicas 1 2]`.

The router and engines of random weights, without a tritonserver, and a client in this process that
talks to them as a bridge does. Prints tokens a second of each load, and behind the last of several
replicas what becomes of streams when an engine is killed. The first load of a kind has kernels
to choose and compile: `--rounds` shows others. `--device cpu` runs the same with a tiny shape.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_config
from slipstream import wire
from slipstream.bridge.connection import Connection
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from slipstream_runtime.directory import Runtime

_START_S = 300.0
_END_S = 300.0


class Client:
    """A bridge that counts tokens, and requests that got none of theirs."""

    def __init__(self) -> None:
        self.num_tokens = self.num_failed = 0
        self._open: set[int] = set()
        self._changed = threading.Condition()
        self._next = 1

    def take(self, outputs: wire.StepOutputs) -> None:
        """Take new tokens."""
        with self._changed:
            for tokens in outputs.tokens:
                self.num_tokens += len(tokens.token_ids)
                if tokens.finished is not None:
                    self._end({tokens.request}, has_failed=False)

    def reject(self, rejected: wire.Rejected) -> None:
        """Note a request that was refused, or whose engine ended."""
        with self._changed:
            self._end({rejected.request})

    def lose_messages(self, requests: Set[int]) -> None:
        """Note requests whose messages were lost."""
        with self._changed:
            self._end(set(requests))

    def lose_engine(self, kept: Set[int]) -> None:
        """Note all requests but those that go on."""
        with self._changed:
            self._end(self._open - kept)

    def is_waiting_for(self, request: int) -> bool:
        """Return whether a request runs."""
        return request in self._open

    def offer(self, connection: Connection, count: int, prompt: int, output: int, of: int) -> None:
        """Send drawn prompts of a vocabulary of `of` tokens."""
        sampling = SamplingParams(max_tokens=output, temperature=0.0)
        for number in range(self._next, self._next + count):
            drawn = random.Random(number)
            ids = pack([drawn.randrange(10, of) for _ in range(prompt)])
            self._open.add(number)
            connection.send(wire.Submit(number, ids, sampling, 1))
        self._next += count

    def wait(self) -> None:
        """Wait until all requests have ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, _END_S):
                raise TimeoutError(f"{len(self._open)} requests have not ended")

    def _end(self, requests: set[int], has_failed: bool = True) -> None:
        self.num_failed += len(requests & self._open) if has_failed else 0
        self._open -= requests
        self._changed.notify_all()


@contextlib.contextmanager
def served(args: argparse.Namespace, replicas: int) -> Iterator[tuple[Connection, Client, Path]]:
    """Yield a connection, its client, and the folder in which engines run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model, python, directory = (Path(folder, name) for name in ("model", "python", "run"))
        write_config(args.shape, model)
        path = os.pathsep.join(sys.path)
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        os.environ["SLIPSTREAM_PYTHON"] = str(python)
        directory.mkdir(mode=0o700)
        server = stack.enter_context(subprocess.Popen(["sleep", "100000"]))
        stack.callback(server.kill)
        config = EngineConfig(
            checkpoint=str(model),
            replicas=replicas,
            device=args.device,
            load_format="random",
            kv_cache_tokens=args.kv_cache_tokens,
        )
        runtime = Runtime(directory)
        starter = SupervisorStarter(runtime, config, server.pid)
        stack.callback(starter.stop)
        client, began = Client(), time.monotonic()
        connection = Connection(runtime.address, "client", client, starter.ensure)
        stack.callback(connection.close)
        if connection.wait_welcome(_START_S) is None:
            raise TimeoutError(runtime.log.read_text())
        print(f"{replicas} replicas: ready after {time.monotonic() - began:.1f} s", flush=True)
        yield connection, client, directory


def engines(directory: Path) -> list[int]:
    """Return the processes of the engines behind a router."""
    found = []
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (each / "cmdline").read_bytes() if each.name.isdigit() else b""
            if b"slipstream.engine.process" in words and f"{directory}/replica-".encode() in words:
                found.append(int(each.name))
    return sorted(found)


def kill_one(
    connection: Connection, client: Client, directory: Path, count: int, of: int
) -> dict[str, Any]:
    """Kill an engine with streams; count those that got an error, and of later ones."""
    client.num_failed = 0
    client.offer(connection, count, 64, 256, of)
    time.sleep(1.0)
    os.kill(engines(directory)[-1], signal.SIGKILL)
    client.wait()
    lost, client.num_failed = client.num_failed, 0
    client.offer(connection, count, 64, 32, of)
    client.wait()
    return {"streams": count, "lost": lost, "later": count, "later_lost": client.num_failed}


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shape", choices=SHAPES, help="default: llama-3.1-8b, or tiny")
    parser.add_argument("--requests", type=int, help="at once (default: 512, or 16)")
    parser.add_argument("--rounds", type=int, default=2, help="of each load (%(default)d)")
    parser.add_argument("--streams", type=int, default=64, help="when one is killed (%(default)d)")
    parser.add_argument("--kv-cache-tokens", type=int, default=200_000)
    args = parser.parse_args()
    is_cpu = args.device == "cpu"
    args.shape = args.shape or ("tiny" if is_cpu else "llama-3.1-8b")
    args.requests = args.requests or (16 if is_cpu else 512)
    of = SHAPES[args.shape]["vocab_size"]
    for replicas in args.replicas:
        with served(args, replicas) as (connection, client, directory):
            for prompt, output in ((128, 128), (1024, 64)):
                for turn in range(args.rounds):
                    client.num_tokens, began = 0, time.monotonic()
                    client.offer(connection, args.requests, prompt, output, of)
                    client.wait()
                    rate = round(client.num_tokens / (time.monotonic() - began))
                    row = {"replicas": replicas, "in": prompt, "out": output, "turn": turn}
                    print(json.dumps(row | {"tok_s": rate}), flush=True)
            if replicas > 1:
                killed = kill_one(connection, client, directory, args.streams, of)
                print(json.dumps({"killed": killed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
