"""`make install`: install the pinned packages in `.venv`, and the server. Idempotent.

    install.py [--serving]

`--serving` leaves out what only tests and checks need; what is there already stays. It runs with
any `python3`, so it needs only the standard library, and it finds a Python for which the server has
a stub before it downloads anything. `EXTRAS` replaces the extras: `cuda12` or `cuda13` among them
chooses that CUDA, neither of them none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # run as a file, before this package can be imported
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from slipstream_serve import gpu_packages
from slipstream_serve.gpu_packages import GpuPackagesError, Version
from slipstream_serve.progress import Packages, Printer, follow, num_packages, say, size_of

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
PIP = [str(VENV / "bin" / "python"), "-m", "pip"]
SERVER = Path(__file__).resolve().with_name("server.py")
CANDIDATES = ("python3.12", "python3.11")  # binary packages exist for all of these
COMPILING = (3, 13)  # from here on numpy 1 is compiled for the stub: the last resort
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl"  # has a folder for each build
SERVING_EXTRAS = "convert"
DEFAULT_EXTRAS = f"{SERVING_EXTRAS},dev,load,nvrtc"
PIP_FLAGS = ("--disable-pip-version-check", "--progress-bar", "off", "--no-compile")
_MOST_CORES = 16  # to compile on: each takes memory


@dataclass(frozen=True)
class Wanted:
    """The extras to install, without CUDA's, and the CUDA major version of torch (0: none)."""

    extras: str
    cuda: int
    driver: Version | None = None


def wanted(
    given: str | None, has_gpu: bool, driver: Version | None, usual: str = DEFAULT_EXTRAS
) -> Wanted:
    """Return what to install, by `EXTRAS` (None: unset, as usual) and the machine.

    With cuda12 the extra `nvrtc` is left out: bindings would take its compiler, of CUDA 13. Raises
    GpuPackagesError for a driver that is too old, or two CUDA versions at once.
    """
    parts = [part.strip() for part in (usual if given is None else given).split(",")]
    majors = {f"cuda{major}": major for major in gpu_packages.MAJORS}
    named = [majors[part] for part in parts if part in majors]
    if len(named) > 1:
        raise GpuPackagesError(f"EXTRAS={given} names two CUDA versions: keep one")
    cuda = named[0] if named else 0
    if has_gpu and given is None:
        cuda = gpu_packages.torch_major(driver)
    unwanted = {"", *majors} | ({"nvrtc"} if cuda == 12 else set())  # which has CUDA 13's compiler
    extras = ["engine", "gateway", *(part for part in parts if part not in unwanted)]
    return Wanted(",".join(dict.fromkeys(extras)), cuda, driver)


def fail(text: str) -> NoReturn:
    """Print one line that says what to do, and exit."""
    print(f"slipstream: {text}", file=sys.stderr)
    sys.exit(1)


def clean_environment() -> dict[str, str]:
    """Return the environment without variables that redirect a Python or its pip elsewhere."""
    unwanted = {
        "PYTHONPATH",
        "PYTHONHOME",
        "PIP_USER",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_REQUIRE_HASHES",
    }
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def quiet(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and keep its output."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=clean_environment()
    )


def find_python() -> str:
    """Return a Python that can run the stub, `python3` first. Exits with the remedy if none can."""
    others = [found for found in map(shutil.which, CANDIDATES) if found]
    must_compile = sys.version_info[:2] >= COMPILING
    for python in [*others, sys.executable] if must_compile else [sys.executable, *others]:
        if quiet([python, str(SERVER), "--missing"]).returncode == 0:
            if must_compile and python == sys.executable:
                say("numpy 1 is compiled for this Python's stub: some minutes, once")
            return python
    lacks = quiet([sys.executable, str(SERVER), "--missing"])
    version = ".".join(map(str, sys.version_info[:3]))
    fail(f"{sys.executable} (Python {version}): {lacks.stdout.strip() or lacks.stderr.strip()}")


def stamp(target: Wanted) -> str:
    """Return what `.venv` depends on, the checkout's path first: a moved .venv does not work.

    Its second line has the extras.
    """
    decided_by = [Path(__file__), Path(gpu_packages.__file__)]
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt", *decided_by]
    content = b"\0".join(file.read_bytes() for file in files)
    return f"{ROOT}\n{target.extras}\ncuda{target.cuda} {hashlib.sha256(content).hexdigest()}\n"


def with_installed(target: Wanted, written: str) -> Wanted:
    """Return a target with the extras that a stamp has beside it, if all else is the same."""
    root, _, rest = stamp(target).split("\n", 2)
    match written.split("\n", 2):
        case [at, extras, others] if (at, others) == (root, rest):
            both = dict.fromkeys([*extras.split(","), *target.extras.split(",")])
            return replace(target, extras=",".join(both))
    return target


def read_stamp() -> str:
    """Return what the last installation that ended well has written; "": nothing."""
    return STAMP.read_text() if STAMP.is_file() else ""


def make_venv() -> None:
    """Make `.venv` if it is missing, was moved, or has lost its Python."""
    python = VENV / "bin" / "python"
    if python.exists() and quiet([str(python), "-c", "import pip"]).returncode == 0:
        written = read_stamp()
        if not written or written.startswith(f"{ROOT}\n"):
            return
    base = find_python()
    say(f"making .venv with {base}")
    done = quiet([base, "-m", "venv", "--clear", str(VENV)])
    if done.returncode != 0:
        version = quiet([base, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout
        package = f"python{version.strip()}-venv"
        fail(f"{base} cannot make a virtual environment: sudo apt-get install {package}")


def has_gpu() -> bool:
    """Return whether the NVIDIA driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists()


def torch_arguments(cuda: int, printer: Printer) -> list[str]:
    """Return pip's arguments for torch: built for this CUDA major version, or (0) for none.

    The build without CUDA is a fraction of the size. The configured indexes come first; PyTorch's
    own index is searched only if they have no such build.
    """
    if cuda == gpu_packages.TORCH_MAJOR:
        return [TORCH]
    builds = gpu_packages.TORCH_BUILDS if cuda else ("cpu",)
    for build in builds:
        version = f"{TORCH}+{build}"
        for index in ([], ["--extra-index-url", f"{TORCH_INDEX}/{build}"]):
            probe = [*PIP, "install", "--dry-run", "--no-deps", *PIP_FLAGS, *index, version]
            where = f"looking for {version}{f' in {index[1]}' if index else ''}"
            code, _ = follow(
                probe, printer, partial(str, where), environment=clean_environment(), folder=ROOT
            )
            if code == 0:
                return [*index, version]
    if cuda:
        raise GpuPackagesError(
            f"no index has {TORCH} for CUDA {cuda} ({', '.join(builds)}): update the NVIDIA driver "
            "to 580 or newer, which runs CUDA 13"
        )
    return [TORCH]


def constraints(cuda: int) -> str:
    """Return the constraints for pip. With CUDA 12 they must not pin packages of CUDA 13."""
    if cuda != 12:
        return "constraints.txt"
    kept = VENV / "constraints-cuda12.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if not line.startswith(("cuda-", "nvidia-"))))
    return str(kept)


def cuda_extra(target: Wanted) -> list[str]:
    """Return the extra with CuPy for the installed torch, and print the choice in one line.

    Raises GpuPackagesError if driver and torch do not fit together.
    """
    if not target.cuda:
        return []
    torch = gpu_packages.torch_cuda(VENV)
    extra = gpu_packages.cuda_extra(target.driver, torch)
    say(gpu_packages.described(target.driver, torch, extra))
    return [extra] if extra else []


def pip_install(
    arguments: list[str], environment: dict[str, str], temporary: Path, printer: Printer
) -> None:
    """Run `pip install` and print its progress."""
    packages, before = Packages(), num_packages(VENV)
    most = 0

    def status() -> str:
        nonlocal most
        most = max(most, size_of(temporary))
        return packages.status(most, max(0, num_packages(VENV) - before))

    command = [*PIP, "install", *PIP_FLAGS, *arguments]
    code, errors = follow(
        command, printer, status, read=packages.read, environment=environment, folder=ROOT
    )
    if code != 0:
        lines = [line for line in errors.splitlines() if line.startswith("ERROR")]
        fail(f"pip failed: {lines[-1] if lines else errors.strip()[-300:]}")


@contextlib.contextmanager
def beside(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `.venv`'s Python beside the block; if that fails, kill it with all that it started."""
    command = [str(VENV / "bin" / "python"), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def install(target: Wanted) -> None:
    """Install the pinned packages and this checkout (editable), the server and the CPU kernels.

    Without a compiler there are no CPU kernels, and it goes on.
    """
    began = time.monotonic()
    STAMP.unlink(missing_ok=True)
    temporary = VENV / "tmp"  # pip downloads to it: beside the packages, and measured
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    environment = clean_environment() | {"TMPDIR": str(temporary)}
    size = "several GB" if target.cuda else f"about {600 if 'dev' in target.extras else 260} MB"
    say(f"installing packages ({size}, torch is the large one) and a tritonserver (140 MB)")
    printer = Printer(sys.stdout)
    # Sources and the standard library are all that their build imports.
    sources = os.pathsep.join((str(ROOT / "backend"), str(ROOT / "ensemble")))
    of_kernels = clean_environment() | {"PYTHONPATH": sources}
    with (
        beside([str(SERVER)], environment) as server,
        beside(["-m", "slipstream.kernels.cpu.build"], of_kernels) as kernels,
    ):

        def status() -> str:
            if server.poll() is None:
                return f"tritonserver: {size_of(temporary) / 1e6:.0f} MB fetched"
            return "compiling packages and CPU kernels"

        install_packages(target, environment, temporary, printer)
        with beside(compile_bytecode(), clean_environment()) as bytecode:
            while any(process.poll() is None for process in (server, kernels, bytecode)):
                printer.show(status)
                time.sleep(0.1)
        printer.clear()
        if server.returncode != 0:
            sys.exit(1)  # it has printed why
    shutil.rmtree(temporary, ignore_errors=True)
    STAMP.write_text(stamp(target))
    say(f"installed in {time.monotonic() - began:.0f} s")


def install_packages(
    target: Wanted, environment: dict[str, str], temporary: Path, printer: Printer
) -> None:
    """Install torch, and then what is built for it."""
    pinned = ["-c", constraints(target.cuda)]
    torch = gpu_packages.torch_cuda(VENV)
    if (torch[0] if torch else 0) != target.cuda:
        compiler = ["nvidia-cuda-nvrtc"] if target.cuda == 12 else []
        quiet([*PIP, "uninstall", "--yes", "torch", *compiler])  # for something else
    first = [*pinned, "setuptools", *torch_arguments(target.cuda, printer)]
    pip_install(first, environment, temporary, printer)
    extras = ",".join([target.extras, *cuda_extra(target)])
    own = ["--no-build-isolation", "-e", f".[{extras}]"]
    pip_install([*pinned, *own], environment, temporary, printer)


def compile_bytecode() -> list[str]:
    """Return Python's arguments to compile all packages on all cores: pip does so on one.

    Some packages hold files of other Pythons, and warnings: about these it says nothing.
    """
    folders = map(str, VENV.glob("lib/python3*/site-packages"))
    num_cores = str(min(_MOST_CORES, len(os.sched_getaffinity(0))))
    return ["-W", "ignore", "-m", "compileall", "-qq", "-j", num_cores, *folders]


def main() -> int:
    """Bring everything up to date; takes a fraction of a second if it is."""
    gpu = has_gpu()
    os.chdir(ROOT)
    try:
        driver = gpu_packages.driver_cuda() if gpu else None
        usual = SERVING_EXTRAS if "--serving" in sys.argv[1:] else DEFAULT_EXTRAS
        target = with_installed(wanted(os.environ.get("EXTRAS"), gpu, driver, usual), read_stamp())
        make_venv()
        if read_stamp() != stamp(target):
            install(target)
            return 0
        return quiet_server()
    except GpuPackagesError as error:
        fail(str(error))
    except KeyboardInterrupt:
        return 130


def quiet_server() -> int:
    """Check the server's own stamp: it may have been removed apart from `.venv`."""
    command = [str(VENV / "bin" / "python"), str(SERVER), "--quiet"]
    return subprocess.run(command, check=False, env=clean_environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
