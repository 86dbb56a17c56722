"""What the router of `--replicas` costs: `python benchmarks/router_hop.py --checkpoint FOLDER`.

Two sources of tokens in the engines' places (`paced_engine.py`: a token a step and stream) behind
the real router, and one of them without it; a client in this process talks to either as a bridge
does. Of each number of streams it prints the processor time that the router's process takes for a
token; how long a last token is on its way, from the source to here; and the time to the first
token of a request that comes alone, whose first step is due a pause after it arrives.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from paced_engine import write_python
from slipstream import wire
from slipstream.bridge.connection import Connection
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from slipstream_runtime.directory import Runtime

_WAIT_S = 120.0
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Client:
    """A bridge that notes when the first and last tokens of its requests came, in ns."""

    def __init__(self) -> None:
        self.first_ns: dict[int, int] = {}
        self.late_ns: list[int] = []  # from the making of a last token until it is here
        self.num_tokens = 0
        self.num_open = 0
        self._changed = threading.Condition()

    def take(self, outputs: wire.StepOutputs) -> None:
        """Take new tokens."""
        now_ns = time.monotonic_ns()
        with self._changed:
            for tokens in outputs.tokens:
                self.num_tokens += len(tokens.token_ids)
                self.first_ns.setdefault(tokens.request, now_ns)
                if tokens.finished is not None:
                    self.late_ns.append(now_ns - tokens.finished.perf.last_token_ns)
                    self.num_open -= 1
                    self._changed.notify_all()

    def reject(self, rejected: wire.Rejected) -> None:
        """Fail: nothing is to be refused here."""
        raise RuntimeError(rejected.message)

    def lose_messages(self, requests: object) -> None:
        """Fail: a lost message spoils the figures."""
        raise RuntimeError("messages were lost")

    def lose_engine(self, kept: Set[int]) -> None:
        """Do nothing: the engine ends after the last figure."""

    def is_waiting_for(self, request: int) -> bool:
        """Return whether a request runs."""
        return False

    def serve(self, connection: Connection, first: int, lengths: list[int]) -> None:
        """Send a request of each length, and wait until all have ended."""
        self.num_open += len(lengths)
        for at, length in enumerate(lengths):
            sampling = SamplingParams(max_tokens=length, temperature=0.0)
            connection.send(wire.Submit(first + at, pack([1, 2, 3, first + at]), sampling, 1))
        with self._changed:
            if not self._changed.wait_for(lambda: not self.num_open, _WAIT_S):
                raise TimeoutError(f"{self.num_open} streams have not ended")


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of a number of streams."""

    replicas: int
    streams: int
    tokens_per_s: float
    process_us: float  # processor time a token of the process that the client talks to
    late_us: float  # median, of last tokens
    late_p99_us: float
    first_us: float  # median time to the first token of a request alone, less the step


@contextlib.contextmanager
def served(options: argparse.Namespace, replicas: int) -> Iterator[tuple[Connection, Client, int]]:
    """Yield a connection to a router or to a source alone, its client, and the process."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        python = Path(folder, "python")
        write_python(python, options.step, Path(folder, "journal"))
        os.environ["SLIPSTREAM_PYTHON"] = str(python)
        server = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(server.kill)
        directory = Path(folder, "run")
        directory.mkdir(mode=0o700)
        config = EngineConfig(checkpoint=str(options.checkpoint.absolute()), replicas=replicas)
        runtime = Runtime(directory)
        starter = SupervisorStarter(runtime, config, server.pid)
        stack.callback(starter.stop)
        client = Client()
        connection = Connection(runtime.address, "client", client, starter.ensure)
        stack.callback(connection.close)
        welcome = connection.wait_welcome(_WAIT_S)
        if welcome is None:
            raise TimeoutError(runtime.log.read_text())
        yield connection, client, welcome.engine_pid


def processor_s(pid: int) -> float:
    """Return the processor time that a process has taken, in s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def measure(options: argparse.Namespace, replicas: int) -> Iterator[Row]:
    """Yield a row for each number of streams."""
    with served(options, replicas) as (connection, client, pid):
        number = 1
        for streams in options.streams:
            alone = []
            for _ in range(options.alone):
                begin_ns = time.monotonic_ns()
                client.serve(connection, number, [1])
                alone.append(client.first_ns[number] - begin_ns - 1e9 * options.step)
                number += 1
            client.late_ns, client.num_tokens = [], 0
            before_s, begin_s = processor_s(pid), time.monotonic()
            while time.monotonic() < begin_s + options.seconds:
                lengths = [options.tokens - at % 16 for at in range(streams)]
                client.serve(connection, number, lengths)
                number += streams
            took_s = time.monotonic() - begin_s
            late = sorted(client.late_ns)
            yield Row(
                replicas,
                streams,
                client.num_tokens / took_s,
                1e6 * (processor_s(pid) - before_s) / client.num_tokens,
                statistics.median(late) / 1e3,
                late[len(late) * 99 // 100] / 1e3,
                statistics.median(alone) / 1e3,
            )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="with a tokenizer")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--step", type=float, default=0.01, help="(%(default)g s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a row (%(default)g)")
    parser.add_argument("--tokens", type=int, default=100, help="of a stream (%(default)d)")
    parser.add_argument("--alone", type=int, default=100, help="first tokens (%(default)d)")
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args()
    rows = []
    for replicas in (1, 2):
        for row in measure(options, replicas):
            rows.append(row)
            print(
                f"{'router' if replicas > 1 else 'source':6} {row.streams:3} streams "
                f"{row.tokens_per_s:7.0f} tok/s  {row.process_us:6.1f} us a token  "
                f"on its way {row.late_us:6.0f} p99 {row.late_p99_us:6.0f} us  "
                f"first {row.first_us:6.0f} us",
                flush=True,
            )
    if options.output:
        options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
