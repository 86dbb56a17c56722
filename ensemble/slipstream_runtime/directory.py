"""The runtime directory: a private folder for the files that one server's processes share.

A server may have several engines. The files of each are in a folder of its own within the runtime
directory; those of the engine of `tensorrt_llm` are in the directory itself.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slipstream_contract.deployment import ENGINE, folder_of

from slipstream_runtime.processes import identity

VARIABLE = "SLIPSTREAM_RUNTIME_DIR"  # `slipstream serve` sets both of these
OWNER_VARIABLE = "SLIPSTREAM_OWNER_PID"  # the engine ends with it; unset: with the tritonserver
GATEWAY = "@gateway"  # in the place of a model, which never has such a name
_LOCK = "engine.lock"
MAX_SOCKET_PATH = 107  # bytes, the kernel's limit for a Unix socket


@dataclass(frozen=True)
class Runtime:
    """The files of a runtime directory, as the processes of one engine see them.

    All processes of one server use the same directory, and those of one engine the same folder.
    """

    directory: Path
    folder: str = ""  # the engine's, see `folder_of`

    def of(self, folder: str) -> "Runtime":
        """Return the files as the processes of another engine see them."""
        return Runtime(self.directory, folder)

    @property
    def home(self) -> Path:
        """The folder of the engine's own files."""
        return self.directory / self.folder

    @property
    def lock(self) -> Path:
        """Locked (flock) by the supervisor for as long as it has an engine."""
        return self.home / _LOCK

    @property
    def memory_lock(self) -> Path:
        """Locked (flock) by an engine that takes its share of the device's memory."""
        return self.directory / "memory.lock"

    @property
    def config(self) -> Path:
        """The settings of the engine, written when its supervisor is started."""
        return self.home / "engine.json"

    @property
    def socket(self) -> Path:
        """The engine's ZeroMQ ROUTER socket."""
        return self.home / "engine.sock"

    @property
    def address(self) -> str:
        """The address of `socket` for ZeroMQ."""
        return f"ipc://{self.socket}"

    @property
    def credits(self) -> Path:
        """The file of `slipstream_runtime.credit.CreditFile`."""
        return self.home / "credits"

    def in_flight(self, model: str, pid: int) -> Path:
        """Return the `slipstream_runtime.inflight` file of one process of a model, or `GATEWAY`."""
        return self.directory / f"in-flight-{model}-{pid}"

    def vitals(self, model: str, pid: int) -> Path:
        """Return the `slipstream_runtime.vitals` file of one process of a model."""
        return self.directory / f"vitals-{model}-{pid}"

    def remove_process_files(self) -> None:
        """Remove the files of all models' processes, which have ended with their server.

        One of them may have noticed its end before its own, and have said that it stops.
        """
        self.stopping.unlink(missing_ok=True)
        for pattern in ("in-flight-*", "vitals-*"):
            for file in self.directory.glob(pattern):
                if GATEWAY not in file.name:  # it outlives the server
                    file.unlink(missing_ok=True)

    @property
    def repairs(self) -> Path:
        """The file of `slipstream_runtime.repairs`: of this engine's models, and of the server."""
        return self.home / "repairs"

    @property
    def spare(self) -> Path:
        """Disk space that `slipstream serve` reserves for its repairs."""
        return self.directory / "spare"

    @property
    def log(self) -> Path:
        """The stdout and stderr of engine and supervisor."""
        return self.home / "engine.log"

    @property
    def error(self) -> Path:
        """The reason, in one line, why the engine could not start; else there is no file."""
        return self.home / "engine.error"

    @property
    def failed_starts(self) -> Path:
        """The file of `slipstream_runtime.failed_starts`; there is none while the engine serves."""
        return self.home / "engine.failed"

    @property
    def unloaded(self) -> Path:
        """A file that exists while the engine does not run because its models were unloaded."""
        return self.home / "unloaded"

    @property
    def stopping(self) -> Path:
        """A file that exists once the server is about to end: streams end with an error then."""
        return self.directory / "stopping"

    @property
    def draining(self) -> Path:
        """The file of `slipstream_runtime.draining`."""
        return self.directory / "draining"


def open_runtime(server_pid: int, engine_model: str = ENGINE) -> Runtime:
    """Return the runtime directory as an engine's processes see it, making what is missing.

    It is `$SLIPSTREAM_RUNTIME_DIR`, set by `slipstream serve`, else a folder in the temporary
    directory, named after the user and the tritonserver (a stub's parent). Raises OSError if it
    cannot be made or trusted, ValueError if its path is too long for a socket in it.
    """
    given = os.environ.get(VARIABLE)
    directory = Path(given) if given else _own_directory(server_pid)
    directory.mkdir(mode=0o700, parents=bool(given), exist_ok=True)
    state = directory.lstat() if not given else directory.stat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory}: not a directory that only this user can write")
    runtime = Runtime(directory, folder_of(engine_model))
    runtime.home.mkdir(mode=0o700, exist_ok=True)
    if len(os.fsencode(runtime.socket)) > MAX_SOCKET_PATH:
        raise ValueError(f"{runtime.socket}: longer than {MAX_SOCKET_PATH} bytes; set TMPDIR")
    return runtime


def _own_directory(server_pid: int) -> Path:
    """Return a directory for this server alone; remove those of earlier servers with its pid.

    A container that is restarted keeps its files, and its server gets the pid of the one before.
    The old server's files, above all `stopping`, must not be taken for the new one's.
    """
    prefix = f"slipstream-{os.getuid()}-"
    directory = Path(tempfile.gettempdir()) / f"{prefix}{identity(server_pid)}"
    for other in directory.parent.glob(f"{prefix}{server_pid}-*"):
        if other != directory and _is_left_over(other):
            shutil.rmtree(other, ignore_errors=True)
    return directory


def _is_left_over(directory: Path) -> bool:
    """Return whether it is this user's and no supervisor lives there, as in another container."""
    try:
        if directory.lstat().st_uid != os.getuid():
            return False
        for path in directory.glob(f"**/{_LOCK}"):
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # another process is removing it
        return True
    except OSError:
        return False
    return True


def hide_shared_memory() -> None:
    """Deny other users access to the shared memory of this stub: it has prompts and answers.

    The Python backend makes its region readable for all, whatever the umask.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in maps if " /dev/shm/" in line}:
        with contextlib.suppress(OSError):  # another user's file, or already unlinked
            os.chmod(path, 0o600)
