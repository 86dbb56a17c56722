"""Run `slipstream gateway` with an engine of its own, on a free port: for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.launch import die_with_parent
from slipstream_runtime.processes import end

from slipstream_serve.triton import ServeError

_START_S = 300.0  # a loaded machine takes minutes; a gateway that ends is noticed at once
_END_S = 30.0  # from SIGTERM to SIGKILL
_LISTENS = re.compile(r"listening on http://(\S+?)/")


@contextlib.contextmanager
def gateway_alone(
    repository: Path, log: Path, *options: str, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a gateway until the block is left: its process and its address, `host:port`.

    It listens, and perhaps cannot generate yet: see `wait_ready`. It ends with the thread that
    has started it, however that ends. Raises ServeError.
    """
    command = [sys.executable, "-m", "slipstream_client.cli", "gateway", "--port", "0"]
    command += ["--model-repository", str(repository), *options]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    try:
        yield process, _address(process, log)
    finally:
        end(process, _END_S)


def wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return once a gateway can generate. Raises ServeError."""
    for _ in _until_started(process, log):
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://{address}/health", timeout=5),
        ):
            return


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    for text in _until_started(process, log):
        if found := _LISTENS.search(text):
            return found[1]
    raise AssertionError("it raises")


def _until_started(process: subprocess.Popen[bytes], log: Path) -> Iterator[str]:
    """Yield the log again and again. Raises ServeError when the process ends, or is late."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        yield log.read_text(errors="replace")
        time.sleep(0.05)
    said = log.read_text(errors="replace")[-4000:]
    why = "ended" if process.poll() is not None else f"is not ready after {_START_S:g} s"
    raise ServeError(f"the gateway {why}:\n{said}")
