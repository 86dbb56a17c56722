"""Run the gateway beside a server: start it, start it again when it dies or hangs, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream_runtime.directory import VARIABLE, Runtime
from slipstream_runtime.processes import end

from slipstream_serve.spawn import signals_blocked, spawn
from slipstream_serve.triton import ServeError

_LOOK_S = 0.25
_ANSWER_S = 2.0
SILENCE_S = 15.0  # of a running gateway, after which it is replaced
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 5.0
_STEADY_S = 5.0  # a gateway that lived so long is started again at once
_END_S = 6.0  # from SIGTERM to SIGKILL: it drains


@dataclass(frozen=True)
class GatewayPlan:
    """What to start."""

    repository: Path
    host: str
    port: int
    options: tuple[str, ...]  # of `slipstream gateway`
    log: Path

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"

    def check_free(self) -> None:
        """Raise ServeError if the port is in use."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except (OSError, OverflowError) as error:
                raise ServeError(
                    f"port {self.port} on {self.host} cannot be used ({error}): choose another "
                    "with --openai-port, or 0 for none"
                ) from None


class GatewayProcess:
    """The gateway's process and its successors, watched by a thread."""

    def __init__(self, plan: GatewayPlan, runtime: Runtime, say: Callable[[str], None]) -> None:
        """Start it; `say` prints a line for the user."""
        self.num_repairs = 0
        self._plan = plan
        self._runtime = runtime
        self._say = say
        self._is_ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._answered_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it can generate. Raises ServeError with the reason if it cannot."""
        deadline = time.monotonic() + timeout_s
        while not self._answers("/health", timeout_s=_ANSWER_S):
            process = self._process
            if process is not None and process.poll() not in (None, 0):
                raise ServeError(f"the gateway cannot start: {self._last_line()}")
            if time.monotonic() > deadline:
                raise ServeError(f"the gateway is not ready in time: see {self._plan.log}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it: running answers get a few seconds."""
        self._is_ending.set()
        self._thread.join()
        if self._process is not None:
            end(self._process, _END_S)

    @property
    def pid(self) -> int:
        """The process id of the present one; 0: there is none."""
        return self._process.pid if self._process is not None else 0

    # --- the thread, which lives as long as the process: it would end with its parent thread ----

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        fault = ""
        while not self._is_ending.is_set():
            began_s = time.monotonic()
            try:
                self._start()
            except OSError as error:
                fault = f"the gateway cannot be started: {error}"
            if fault:
                self._wait_ready_again()
                self.num_repairs += 1
                seconds = time.monotonic() - began_s
                self._report(f"{fault}; started again in {seconds:.1f} s")
            fault = self._watch()
            has_lived = time.monotonic() - began_s > _STEADY_S
            pause_s = _FIRST_PAUSE_S if has_lived else min(2 * pause_s, _MAX_PAUSE_S)
            if fault and self._is_ending.wait(pause_s):
                return

    def _start(self) -> None:
        plan = self._plan
        command = [sys.executable, "-P", "-m", "slipstream_client.cli", "gateway"]
        command += ["--model-repository", str(plan.repository)]
        command += ["--runtime", str(self._runtime.directory)]
        command += ["--host", plan.host, "--port", str(plan.port), *plan.options]
        environment = {**os.environ, VARIABLE: str(self._runtime.directory)}
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        with plan.log.open("ab") as log, signals_blocked() as usual:
            self._process = spawn(command, environment, Path(tempfile.gettempdir()), log, usual)
        self._answered_s = time.monotonic()

    def _watch(self) -> str:
        """Return what is wrong with it, once something is; empty: it is being ended."""
        process = self._process
        if process is None:
            return "the gateway could not be started"
        while not self._is_ending.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_LOOK_S)
                what = signal.Signals(-code).name if code < 0 else f"code {code}"
                return f"the gateway (pid {process.pid}) ended with {what}"
            if self._answers("/ping"):
                self._answered_s = time.monotonic()
            elif time.monotonic() - self._answered_s > SILENCE_S:
                process.kill()
                process.wait()
                return f"the gateway (pid {process.pid}) did not answer for {SILENCE_S:g} s"
        return ""

    def _wait_ready_again(self) -> None:
        deadline = time.monotonic() + SILENCE_S  # without an engine it is not ready
        while not self._answers("/health") and time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                return
            if self._is_ending.wait(0.02):
                return

    def _answers(self, path: str, timeout_s: float = _ANSWER_S) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._plan.url}{path}", timeout=timeout_s) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._plan.log.read_text(errors="replace").splitlines()
            return next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"see {self._plan.log}"

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # no reader, or no disk space
            self._say(f"{time.strftime('%H:%M:%S')} {line}")


def plan_of(
    repository: Path, host: str, port: int, options: Sequence[str], log: Path
) -> GatewayPlan | None:
    """Return what to start; None for port 0. `log`: tritonserver's, beside which its own is."""
    if port == 0:
        return None
    own = log if str(log).startswith("/dev/") else log.with_name(f"gateway-{port}.log")
    return GatewayPlan(repository.resolve(), host, port, tuple(options), own)
