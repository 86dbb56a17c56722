"""Build the library of the processor's kernels: `python -m slipstream.kernels.cpu.build`.

It needs a C++ compiler (`CXX`, else g++ or clang++) and half a minute, once: the library is kept
with other files that can be made again, by a digest of sources, flags and compiler.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream_runtime.locking import locked

from slipstream.kernels.runtime import disk_cache

_HERE = Path(__file__).parent
_WIDE = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
_SOURCES: dict[str, tuple[str, ...]] = {  # with what each may use
    "avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "avx512.cpp": _WIDE,
    "vnni.cpp": (*_WIDE, "-mavx512vnni"),
    "amx.cpp": (*_WIDE, "-mavx512vnni", "-mamx-tile", "-mamx-int8"),
    "step.cpp": (),
    "pool.cpp": (),
}
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-ignored-attributes"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # in GCC's own headers
    "-Wno-unknown-warning-option",
)
_MACHINES = ("x86_64", "AMD64")
_JOBS = 4
_FOLDER = "building-"


class BuildError(Exception):
    """There is no compiler, or it refuses the sources; the message is for users."""


def compiler() -> str:
    """Return the path of the C++ compiler; raises BuildError."""
    if platform.machine() not in _MACHINES:
        raise BuildError(f"there are no kernels for {platform.machine()}")
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++"):
        if found := shutil.which(name):
            return found
    asked = f"CXX = {named!r} is not a program" if named else "there is no g++ and no clang++"
    raise BuildError(f"{asked}: apt-get install g++")


@functools.cache
def digest(command: str, flags: tuple[str, ...]) -> str:
    """Return what a library depends on, in 16 hexadecimal digits."""
    version = subprocess.run([command, "--version"], check=False, capture_output=True).stdout
    parts = [version, repr((_FLAGS, flags, _SOURCES)).encode()]
    for path in sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")]):
        parts += [path.name.encode(), path.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def path_of(command: str, flags: tuple[str, ...] = ()) -> Path:
    """Return where the library is once it is built; `flags` come behind the usual ones."""
    return disk_cache.folder("cpu") / f"kernels-{digest(command, flags)}.so"


def built(flags: tuple[str, ...] = ()) -> Path:
    """Return the library, built if it is not there; raises BuildError."""
    command = compiler()
    path = path_of(command, flags)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / "lock"):  # one process builds, the others wait for it
            if not path.is_file():
                for left in path.parent.glob(f"{_FOLDER}*"):  # by one that was killed
                    shutil.rmtree(left, ignore_errors=True)
                _build(command, flags, path)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}") from error
    return path


def _build(command: str, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=path.parent) as name:
        folder = Path(name)

        def compile_one(source: str) -> str:
            out = str(folder / f"{source}.o")
            own = [*_FLAGS, *_SOURCES[source], *flags]
            _run([command, *own, "-c", str(_HERE / source), "-o", out])
            return out

        with ThreadPoolExecutor(min(_JOBS, os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile_one, _SOURCES))
        whole = folder / path.name
        _run([command, "-shared", "-pthread", *flags, *objects, "-o", str(whole)])
        whole.replace(path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise BuildError(f"{command[0]} fails: {lines[0].strip()}")


def main() -> int:
    """Build and say so; without a compiler, say what that costs. The exit code is 0."""
    try:
        command = compiler()
        if not path_of(command).is_file():
            print(f"slipstream: building the CPU kernels with {command}, once", flush=True)
        built()
    except BuildError as error:
        print(f"slipstream: no CPU kernels: {error}; without them a CPU takes torch's, which are")
        print("slipstream: several times slower at few streams (a GPU needs neither)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
