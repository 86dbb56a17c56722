"""Where the processes of one server meet: a private directory."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slipstream_runtime.processes import identity

VARIABLE = "SLIPSTREAM_RUNTIME_DIR"  # `slipstream serve` sets both of these
OWNER_VARIABLE = "SLIPSTREAM_OWNER_PID"  # whose end is the engine's; unset: the tritonserver's
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
        """`slipstream_runtime.credit.CreditFile`."""
        return self.directory / "credits"

    def in_flight(self, model: str, pid: int) -> Path:
        """`slipstream_runtime.inflight` of one process of a model."""
        return self.directory / f"in-flight-{model}-{pid}"

    def vitals(self, model: str, pid: int) -> Path:
        """`slipstream_runtime.vitals` of one process of a model."""
        return self.directory / f"vitals-{model}-{pid}"

    @property
    def repairs(self) -> Path:
        """`slipstream_runtime.repairs`."""
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

    It is the one that `slipstream serve` has made (`$SLIPSTREAM_RUNTIME_DIR`), else one under the
    temporary directory, named after the user and the tritonserver (a stub's parent). Raises OSError
    if it cannot be made or trusted, ValueError if its path leaves no room for a socket's name.
    """
    given = os.environ.get(VARIABLE)
    directory = Path(given) if given else _own_directory(server_pid)
    directory.mkdir(mode=0o700, parents=bool(given), exist_ok=True)
    state = directory.lstat() if not given else directory.stat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory}: not a directory that only this user can write")
    runtime = Runtime(directory)
    if len(os.fsencode(runtime.socket)) > MAX_SOCKET_PATH:
        raise ValueError(f"{runtime.socket}: longer than {MAX_SOCKET_PATH} bytes; set TMPDIR")
    return runtime


def _own_directory(server_pid: int) -> Path:
    """Of this server and of none before it; what those of its number have left is removed.

    A container that was stopped or has crashed is started again with its files, and its server with
    the number of the one before: what that one said of itself, that it was about to end above all,
    must not be taken for this one's word.
    """
    prefix = f"slipstream-{os.getuid()}-"
    directory = Path(tempfile.gettempdir()) / f"{prefix}{identity(server_pid)}"
    for other in directory.parent.glob(f"{prefix}{server_pid}-*"):
        if other != directory and _is_left_over(other):
            shutil.rmtree(other, ignore_errors=True)
    return directory


def _is_left_over(directory: Path) -> bool:
    """Whether it is ours and no supervisor lives there, as one of another container could."""
    try:
        if directory.lstat().st_uid != os.getuid():
            return False
        with Runtime(directory).lock.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # it came to no engine, or somebody else removes it just now
        return True
    except OSError:
        return False
    return True


def hide_shared_memory() -> None:
    """Let no other user read what this stub shares with its server: prompts and answers.

    The Python backend makes its region readable for all, whatever the umask is.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in maps if " /dev/shm/" in line}:
        with contextlib.suppress(OSError):  # another's, or unlinked already
            os.chmod(path, 0o600)
