"""`make install`: `.venv` with the pinned packages, and beside it the server. Safe to repeat.

Runs with whatever `python3` there is, so it needs the standard library alone, and it finds a Python
that this server's stub exists for before it downloads anything.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
SERVER = Path(__file__).resolve().with_name("server.py")
CANDIDATES = ("python3.12", "python3.11")  # for which everything is ready
COMPILING = (3, 13)  # from here on numpy 1 must be compiled for the stub: the last resort
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DEFAULT_EXTRAS = "dev,load,nvrtc"
GPU_EXTRA = "cuda13"  # what torch's own wheels are built for
PIP_FLAGS = ("--disable-pip-version-check", "--progress-bar", "off", "--quiet")


def say(text: str) -> None:
    """One line of progress."""
    print(f"slipstream: {text}", flush=True)


def fail(text: str) -> NoReturn:
    """End with one line that says what to do."""
    print(f"slipstream: {text}", file=sys.stderr)
    sys.exit(1)


def clean_environment() -> dict[str, str]:
    """Without what would make a Python or its pip look elsewhere than into its own environment."""
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
    """Run to the end, output kept."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=clean_environment()
    )


def find_python() -> str:
    """A Python that can carry the stub, `python3` first. Ends with the remedy where none can."""
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


def digest(extras: str) -> str:
    """What `.venv` depends on. Begins with the checkout's path: a moved .venv does not work."""
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__))
    content = b"\0".join(file.read_bytes() for file in files)
    return f"{ROOT}\n{extras}\n{hashlib.sha256(content).hexdigest()}\n"


def make_venv() -> None:
    """Make `.venv` where there is none, or where the one there was moved or lost its Python."""
    python = VENV / "bin" / "python"
    if python.exists() and quiet([str(python), "-c", "import pip"]).returncode == 0:
        stamp = STAMP.read_text() if STAMP.is_file() else ""
        if not stamp or stamp.startswith(f"{ROOT}\n"):
            return
    base = find_python()
    say(f"making .venv with {base}")
    done = quiet([base, "-m", "venv", "--clear", str(VENV)])
    if done.returncode != 0:
        version = quiet([base, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout
        package = f"python{version.strip()}-venv"
        fail(f"{base} cannot make a virtual environment: sudo apt-get install {package}")


def has_gpu() -> bool:
    """Whether the NVIDIA driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists()


def torch_arguments(pip: list[str]) -> list[str]:
    """How pip gets torch: without a GPU the build that carries no CUDA, a fraction of the size.

    The configured indexes come first; only where they have no such build is PyTorch's own asked.
    """
    if has_gpu():
        return [TORCH]
    cpu = f"{TORCH}+cpu"
    for index in ([], ["--extra-index-url", TORCH_CPU_INDEX]):
        probe = [*pip, "install", "--dry-run", "--no-deps", *PIP_FLAGS, *index, cpu]
        if quiet(probe).returncode == 0:
            return [*index, cpu]
    return [TORCH]


def constraints(extras: str) -> str:
    """The file that pip is held to. With CUDA 12 the CUDA 13 packages in it must not bind."""
    if "cuda12" not in extras.split(","):
        return "constraints.txt"
    kept = VENV / "constraints-cuda12.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if not line.startswith(("cuda-", "nvidia-"))))
    return str(kept)


def install(extras: str) -> None:
    """Install the pinned packages and this checkout (editable) while the server is put together."""
    python = str(VENV / "bin" / "python")
    pip = [python, "-m", "pip"]
    began = time.monotonic()
    STAMP.unlink(missing_ok=True)
    server = subprocess.Popen([python, str(SERVER)], cwd=ROOT, env=clean_environment())
    say("installing packages (torch is the large one) and tritonserver ...")
    target = [".[" + extras + "]" if extras else "."]
    held = ["install", *PIP_FLAGS, "-c", constraints(extras)]
    steps = (
        [*pip, *held, "setuptools", *torch_arguments(pip)],
        [*pip, *held, "--no-build-isolation", "-e", *target],
    )
    try:
        for step in steps:
            done = quiet(step)
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                fail(f"pip failed: {lines[-1] if lines else done.stderr.strip()[-300:]}")
        if server.wait() != 0:
            sys.exit(1)  # it has said why
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait()
    STAMP.write_text(digest(extras))
    say(f"installed in {time.monotonic() - began:.0f} s")


def main() -> int:
    """Bring everything up to date; a fraction of a second where it is."""
    default = f"{DEFAULT_EXTRAS},{GPU_EXTRA}" if has_gpu() else DEFAULT_EXTRAS
    extras = os.environ.get("EXTRAS", default)
    os.chdir(ROOT)
    try:
        make_venv()
        if not STAMP.is_file() or STAMP.read_text() != digest(extras):
            install(extras)
            return 0
        return quiet_server()
    except KeyboardInterrupt:
        return 130


def quiet_server() -> int:
    """Check the server's own stamp: it may have been removed apart from `.venv`."""
    command = [str(VENV / "bin" / "python"), str(SERVER), "--quiet"]
    return subprocess.run(command, check=False, env=clean_environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
