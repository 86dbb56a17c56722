"""A tritonserver process and everything it starts: start, readiness, end without a trace.

Every process of a server has its runtime directory in the environment, by which stubs and engine
are found, however they were started; the server's shared memory has a prefix of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream_runtime.directory import OWNER_VARIABLE, VARIABLE, Runtime
from slipstream_runtime.processes import in_group, is_running

from slipstream_serve.awaited import AwaitedEnds
from slipstream_serve.control import control, loaded
from slipstream_serve.ports import free_ports
from slipstream_serve.reasons import reason_of
from slipstream_serve.server import server_directory, server_environment, stub_directory
from slipstream_serve.spawn import signals_blocked, spawn
from slipstream_serve.workarounds.triton_24_10 import http_notes

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_NEEDED = 32 << 20  # bytes: ten stubs start with 1 MiB each and grow with tensors
_OF_A_MODEL = 4 << 20  # bytes, of many models
MAX_TEMPORARY_PATH = 36  # bytes; a socket's whole path may have 107
ENDING_S = 0.4  # time for the bridges to end all streams
EXIT_TIMEOUT_S = 4  # for requests in flight, checked once a second, and for unloading
CONTROL_HEADER = "slipstream-control"
# With shared memory a client could read and write the models' regions, by name; tracing while a
# queue is full crashes 24.10. These APIs need a header with this server's own key.
_CONTROL_API = "model-repository"
CLOSED_APIS = f"{_CONTROL_API},shared-memory,trace,logging"
RUNTIME_PREFIX = "slipstream-serve-"
_STUB = "triton_python_backend_stub"
_INSTANCE = re.compile(r"_\d+_\d+$")
_AWKWARD = re.compile(r"[^\w./+,:@%=-]")


class ServeError(Exception):
    """The server cannot start or has ended; one line that says what is wrong and what to do."""


@dataclass(frozen=True)
class Endpoints:
    """The addresses on which the server listens."""

    http_port: int
    grpc_port: int
    metrics_port: int
    host: str = "127.0.0.1"

    @classmethod
    def free(cls) -> Endpoints:
        """Return free ports, which no other caller gets while this process lives."""
        http, grpc, metrics = free_ports(3)
        return cls(http, grpc, metrics)

    @property
    def connectable(self) -> tuple[str, int]:
        """Host and HTTP port, for clients on this machine."""
        return self._reachable, self.http_port

    @property
    def http(self) -> str:
        """The HTTP address, for clients on this machine."""
        return f"http://{self._reachable}:{self.http_port}"

    @property
    def grpc(self) -> str:
        """The gRPC address, for clients on this machine."""
        return f"{self._reachable}:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        """The Prometheus address, for clients on this machine."""
        return f"http://{self._reachable}:{self.metrics_port}/metrics"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def _reachable(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def check_free(self) -> None:
        """Raise ServeError naming the first port that is in use."""
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        if len(set(ports.values())) < len(ports):
            raise ServeError("the HTTP, gRPC and metrics ports must differ")
        for name, port in ports.items():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except (OSError, OverflowError) as error:
                    raise ServeError(
                        f"port {port} on {self.host} cannot be used ({error}): "
                        f"choose another with --{name}-port"
                    ) from None


def check_repository(repository: Path) -> list[str]:
    """Return the names of the repository's models. Raises ServeError if one cannot be served."""
    if not repository.is_dir():
        raise ServeError(f"{repository}: no such directory; make one with `slipstream compose`")
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        is_checkpoint = (repository / "config.json").is_file()
        hint = "; `slipstream compose` makes a repository of a checkpoint" if is_checkpoint else ""
        raise ServeError(f"{repository}: contains no model (no */config.pbtxt){hint}")
    for name in models:
        if not any(path.name.isdigit() for path in (repository / name).iterdir()):
            raise ServeError(f"{repository / name}: has no version directory (1/)")
    return models


def check_shared_memory(num_models: int = 0) -> None:
    """Raise ServeError if /dev/shm is too small for the stubs (Docker's default is 64 MiB)."""
    state = os.statvfs(SHARED_MEMORY)
    free = state.f_bavail * state.f_frsize
    needed = max(SHARED_MEMORY_NEEDED, num_models * _OF_A_MODEL)
    if free < needed:
        raise ServeError(
            f"/dev/shm has {free >> 20} MiB free, {needed >> 20} are needed: "
            "enlarge it (docker run --shm-size=1g)"
        )


def kill(pids: list[int]) -> None:
    """Kill processes; return when they are gone, after at most 2 s."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)


class TritonServer:
    """A tritonserver on one model repository.

    Only its supervisor may load and unload models of a supervised server, unless control is open,
    and its engines live as long as this process: they outlive a restart of the server.
    """

    def __init__(
        self,
        repository: Path,
        endpoints: Endpoints,
        log: Path,
        is_supervised: bool = False,
        models: Sequence[str] | None = None,
        has_open_control: bool = False,
    ) -> None:
        """Make the runtime directory.

        Args:
            repository, endpoints, log: of the server.
            is_supervised: whether a supervisor in this process repairs its models.
            models: those that a supervised server loads when it starts; None: all.
            has_open_control: whether clients may load and unload models of a supervised server.
        """
        self.models = models
        self.has_open_control = has_open_control
        self.repository = repository.resolve()
        self.endpoints = endpoints
        self.log = log
        self.note_room: int | None = None  # result of `http_notes.widen`; None: not permitted
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # offset of this start's lines
        self._is_supervised = is_supervised
        self._control_key = secrets.token_hex(16)
        self._prefix = f"slipstream_{os.getpid()}_{secrets.token_hex(4)}_"
        prefix = f"{RUNTIME_PREFIX}{os.getpid()}-"
        self.runtime = Runtime(Path(tempfile.mkdtemp(prefix=prefix, dir=temporary_directory())))

    def start(self) -> None:
        """Start the process; it is not ready yet. Raises ServeError if it cannot be run.

        After `kill()` it may be started again, with the same runtime directory.
        """
        server, stub = server_directory(), stub_directory()
        binary = server / "bin" / "tritonserver"
        if not binary.is_file():
            raise ServeError(
                f"no tritonserver in {server}: make install (or set SLIPSTREAM_SERVER)"
            )
        environment = server_environment(server, stub)
        environment[VARIABLE] = str(self.runtime.directory)
        environment.setdefault("SLIPSTREAM_PYTHON", sys.executable)
        if self._is_supervised:
            environment[OWNER_VARIABLE] = str(os.getpid())
        # The stub's sys.path starts with the server's working directory.
        working = self.runtime.directory / "cwd"
        working.mkdir(exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with (
            self.log.open("wb" if self._process is None else "ab") as log,
            signals_blocked() as usual,
        ):
            self._log_begin = log.tell() if log.seekable() else 0  # /dev/stderr of a container
            command = [str(binary), *self._arguments(server)]
            self._process = spawn(command, environment, working, log, usual)

    def _arguments(self, server: Path) -> list[str]:
        ends = self.endpoints
        return [
            f"--model-repository={self._plain(self.repository, 'repository')}",
            f"--backend-directory={self._plain(server / 'backends', 'backends')}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--http-address={ends.host}",
            f"--http-port={ends.http_port}",
            f"--grpc-address={ends.host}",
            f"--grpc-port={ends.grpc_port}",
            f"--metrics-address={ends.host}",
            f"--metrics-port={ends.metrics_port}",
            *self._control_arguments(),
        ]

    def _control_arguments(self) -> Iterator[str]:
        if self._is_supervised:
            yield "--model-control-mode=explicit"
            yield from (f"--load-model={model}" for model in self.models or ())
            if self.models is None:
                yield "--load-model=*"
        closed = (
            CLOSED_APIS.removeprefix(f"{_CONTROL_API},") if self.has_open_control else CLOSED_APIS
        )
        for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
            yield f"{option}={closed}:{CONTROL_HEADER}={self._control_key}"

    def control(self, verb: str, model: str, timeout_s: float) -> None:
        """`load` or `unload` a model of a supervised server. Raises ServeError on failure."""
        error = control(
            self.endpoints.grpc, CONTROL_HEADER, self._control_key, verb, model, timeout_s
        )
        if error is not None:
            raise ServeError(f"{verb} of model {model}: {error}")

    def loaded(self, timeout_s: float) -> set[str]:
        """Return the models of a supervised server that are loaded. Raises ServeError."""
        found = loaded(self.endpoints.grpc, CONTROL_HEADER, self._control_key, timeout_s)
        if isinstance(found, str):
            raise ServeError(f"index of the models: {found}")
        return found

    def _plain(self, path: Path, name: str) -> Path:
        """Return `path`, or a link to it: the Python backend passes paths to a shell unquoted."""
        if not _AWKWARD.search(str(path)):
            return path
        link = self.runtime.directory / name
        if not link.is_symlink():
            link.symlink_to(path)
        return link

    @property
    def pid(self) -> int:
        """The tritonserver's process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the server runs."""
        return self._process.poll() if self._process else None

    def is_ready(self) -> bool:
        """Return whether `/v2/health/ready` says so, and metrics are served.

        Metrics come last: with their port the server opens the last of its socket pairs.
        """
        try:
            for url in (f"{self.endpoints.http}/v2/health/ready", self.endpoints.metrics):
                with urllib.request.urlopen(url, timeout=2) as reply:
                    if reply.status != 200:
                        return False
        except (urllib.error.URLError, OSError):
            return False
        return True

    def wait_ready(self, timeout_s: float, interval_s: float = 0.05) -> None:
        """Return once it is ready. Raises ServeError if it ends or hangs, or on timeout."""
        deadline, awaited = time.monotonic() + timeout_s, AwaitedEnds()
        while not self.is_ready():
            if self.exit_code is not None:
                raise ServeError(self.reason())
            if hang := awaited.look(self.pid, self.stubs):
                raise ServeError(hang)
            if time.monotonic() > deadline:
                raise ServeError(f"not ready after {timeout_s:.0f} s: see {self.log}")
            time.sleep(interval_s)
        self.widen_notes()

    def widen_notes(self) -> None:
        """Make room for responses that wait for a busy HTTP thread, if that is permitted.

        Call it when the server is ready: it has opened all its socket pairs by then.
        """
        with contextlib.suppress(OSError):
            self.note_room = http_notes.widen(self.pid)

    def reason(self) -> str:
        """Return why it ended, in one line: from an engine's error file, else the server's log."""
        for file in self.engine_errors():
            with contextlib.suppress(OSError):
                said = file.read_text(errors="replace").strip()
                if said:
                    name = "" if file == self.runtime.error else f"{file.parent.name}: "
                    return f"{name}{said.splitlines()[0]}"
        data = self.log.read_bytes() if self.log.is_file() else b""
        text = data[self._log_begin :].decode(errors="replace")
        if found := reason_of(text):
            return found
        code = self.exit_code or 0
        if code < 0:
            return f"tritonserver was ended by {signal.Signals(-code).name} (log: {self.log})"
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        said = errors[-1].removeprefix("error: ") if errors else "no reason in its log"
        return f"tritonserver ended with code {code}: {said} (log: {self.log})"

    def engine_errors(self) -> list[Path]:
        """Return the files that say why an engine could not start."""
        name = self.runtime.error.name
        return [*self.runtime.directory.glob(name), *self.runtime.directory.glob(f"*/{name}")]

    def processes(self) -> Iterator[int]:
        """Yield every live process of this server, with the server itself."""
        return _processes_of(self.runtime.directory)

    def stubs(self) -> dict[int, str]:
        """Return the models' processes: pid -> instance of a model by Triton's name (`m_0_0`)."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                if Path(words[0]).name == _STUB:
                    found[pid] = next((word for word in words if _INSTANCE.search(word)), "?")
        return found

    def stop(self, patience_s: float = 6.0) -> None:
        """End it and all it started; remove its shared memory and runtime directory.

        Takes at most `patience_s` + 2 seconds: first by SIGTERM, then by SIGKILL. Idempotent.
        """
        if self._process and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self.runtime.stopping.touch()
            # An ending server refuses the next step of an ensemble and, before Triton 26.03, then
            # waits for it in vain: so the bridges end the streams first.
            time.sleep(ENDING_S)
            self._process.terminate()
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._end_rest(signal.SIGTERM, 1.5)
        self._end_rest(signal.SIGKILL, 0.5)
        self._remove_shared_memory()
        shutil.rmtree(self.runtime.directory, ignore_errors=True)

    @contextlib.contextmanager
    def running(self, timeout_s: float = 300.0) -> Iterator[TritonServer]:
        """Start it and run the block once it is ready; stop it after. Raises ServeError."""
        try:
            self.start()
            self.wait_ready(timeout_s)
            yield self
        finally:
            self.stop()

    def kill(self) -> None:
        """Kill the server and its models' processes; the engine and the directory stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            kill(in_group(self._process.pid))
        self._remove_shared_memory()

    def _remove_shared_memory(self) -> None:
        for region in SHARED_MEMORY.glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)

    def _end_rest(self, number: signal.Signals, patience_s: float) -> None:
        for pid in self._rest():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while self._rest() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _rest(self) -> set[int]:
        """Return what an ended server leaves: engine, supervisor, and models' processes."""
        return {*self.processes(), *(in_group(self._process.pid) if self._process else ())}


def _processes_of(directory: Path) -> Iterator[int]:
    """Yield every live process that has this runtime directory, but the caller's."""
    mark = f"{VARIABLE}={directory}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def clean_leftovers() -> None:
    """Remove what `slipstream serve`s that were killed left: processes, shared memory, directories.

    Such a tritonserver ends by itself, but holds its ports for seconds longer. Call this before
    the process makes any: what has its pid belongs to an earlier process, as in a restarted
    container.
    """
    regions = [
        (region, region.name.split("_")[1]) for region in SHARED_MEMORY.glob("slipstream_*_*")
    ]
    folders = temporary_directory().glob(f"{RUNTIME_PREFIX}*-*")
    for path, owner in [*regions, *((folder, folder.name.split("-")[2]) for folder in folders)]:
        if owner.isdigit() and (int(owner) == os.getpid() or not is_running(int(owner))):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    kill(list(_processes_of(path)))
                    shutil.rmtree(path)
                else:
                    path.unlink()


def temporary_directory() -> Path:
    """Return the folder for runtime directories: the usual one, unless its path is unsuitable."""
    base = tempfile.gettempdir()
    return Path("/tmp" if _AWKWARD.search(base) or len(base) > MAX_TEMPORARY_PATH else base)
