"""A running `slipstream serve`, watched from outside."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream_serve.triton import SHARED_MEMORY, Endpoints

SLIPSTREAM = [sys.executable, "-m", "slipstream_client.cli", "serve"]


class Serve:
    """A running `slipstream serve`."""

    def __init__(self, repository: Path, scratch: Path, *options: str) -> None:
        free = Endpoints.free()
        self.ports = (free.http_port, free.grpc_port, free.metrics_port)
        self.scratch = scratch
        scratch.mkdir(exist_ok=True)
        http, grpc, metrics = map(str, self.ports)
        self.process = subprocess.Popen(
            [
                *SLIPSTREAM,
                *("--model-repository", str(repository), "--log-file", str(scratch / "server.log")),
                *("--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics),
                *options,
            ],
            env=os.environ | {"TMPDIR": str(scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[0]}{path}"

    def wait_ready(self) -> str:
        """What it printed until it was ready."""
        deadline = time.monotonic() + 120
        assert self.process.stdout is not None
        shown = ""
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            shown += line
            if line.startswith("Ctrl-C"):
                return shown
            assert line or self.process.poll() is None, self.process.communicate()
        raise AssertionError(f"not ready within 120 s: {shown}")

    def wait_line(self, word: str, timeout_s: float = 90.0) -> str:
        """The next line on stdout with that word in it. Lines before it are passed over."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        seen = ""
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            seen += line
            if word in line:
                return line
            assert line or self.process.poll() is None, self.process.communicate()
        raise AssertionError(f"no {word!r} within {timeout_s} s: {seen}")

    def pid(self, word: str) -> int:
        """The process of this server with that word in its command line."""
        mark = f"SLIPSTREAM_RUNTIME_DIR={self.scratch}/".encode()
        return next(pid for pid, line in living() if word in line and mark in environment(pid))

    def end(self, number: signal.Signals) -> float:
        """Seconds from the signal to the end."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - began

    def processes(self) -> list[str]:
        """Command lines of living processes with this server's runtime directory."""
        mark = f"SLIPSTREAM_RUNTIME_DIR={self.scratch}/".encode()
        return [line for pid, line in living() if mark in environment(pid)]

    def shared_memory(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"slipstream_{self.process.pid}_*"))

    def assert_gone(self) -> None:
        assert self.processes() == []
        assert self.shared_memory() == []
        assert list(self.scratch.glob("slipstream-*")) == []


def living() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            yield int(entry.name), line


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary directory with a short name: a socket's path must fit under it."""
    folder = Path(tempfile.mkdtemp(prefix="serve-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*SLIPSTREAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("slipstream: ")
    for word in words:
        assert word in done.stderr
