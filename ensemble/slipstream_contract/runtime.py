"""Where the processes of one server meet: a private directory."""

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "SLIPSTREAM_RUNTIME_DIR"
OWNER_VARIABLE = "SLIPSTREAM_OWNER_PID"  # whose end is the engine's; unset: the tritonserver's
PROBE = "probe"  # request parameter: a generating model answers with an empty final response
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's address


@dataclass(frozen=True)
class Runtime:
    """The files of a runtime directory. All of one server's processes see the same one."""

    directory: Path

    @property
    def lock(self) -> Path:
        """Held (flock) by the supervisor for as long as it lives."""
        return self.directory / "engine.lock"

    @property
    def socket(self) -> Path:
        """The engine's ROUTER."""
        return self.directory / "engine.sock"

    @property
    def address(self) -> str:
        """The socket as ZeroMQ writes it."""
        return f"ipc://{self.socket}"

    @property
    def credits(self) -> Path:
        """`slipstream_contract.credit.CreditFile`."""
        return self.directory / "credits"

    def in_flight(self, model: str, pid: int) -> Path:
        """`slipstream_contract.inflight` of one process of a model."""
        return self.directory / f"in-flight-{model}-{pid}"

    def vitals(self, model: str, pid: int) -> Path:
        """`slipstream_contract.vitals` of one process of a model."""
        return self.directory / f"vitals-{model}-{pid}"

    @property
    def repairs(self) -> Path:
        """`slipstream_contract.repairs`."""
        return self.directory / "repairs"

    @property
    def spare(self) -> Path:
        """Room that `slipstream serve` holds for its repairs."""
        return self.directory / "spare"

    @property
    def log(self) -> Path:
        """What engine and supervisor write to stdout and stderr."""
        return self.directory / "engine.log"

    @property
    def error(self) -> Path:
        """One line, there only if the engine could not start."""
        return self.directory / "engine.error"

    @property
    def stopping(self) -> Path:
        """There once the server is about to end: streams are told so instead of holding it up."""
        return self.directory / "stopping"


def open_runtime(server_pid: int) -> Runtime:
    """The runtime directory, made if it is missing.

    It is `$SLIPSTREAM_RUNTIME_DIR` if that is set, else one under the temporary directory, named
    after the user and the tritonserver (a stub's parent). Raises OSError if it cannot be made or
    trusted, ValueError if its path leaves no room for a socket's name.
    """
    given = os.environ.get(VARIABLE)
    name = f"slipstream-{os.getuid()}-{server_pid}"
    directory = Path(given) if given else Path(tempfile.gettempdir()) / name
    directory.mkdir(mode=0o700, parents=bool(given), exist_ok=True)
    state = directory.lstat() if not given else directory.stat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory}: not a directory that only this user can write")
    runtime = Runtime(directory)
    if len(os.fsencode(runtime.socket)) > MAX_SOCKET_PATH:
        raise ValueError(f"{runtime.socket}: longer than {MAX_SOCKET_PATH} bytes; set {VARIABLE}")
    return runtime


def hide_shared_memory() -> None:
    """Let no other user read what this stub shares with its server: prompts and answers.

    The Python backend makes its region readable for all, whatever the umask is.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in maps if " /dev/shm/" in line}:
        with contextlib.suppress(OSError):  # another's, or unlinked already
            os.chmod(path, 0o600)
