"""Choose the CUDA packages of `.venv`: by the CUDA that the driver runs and torch is built for.

CuPy and cuda-bindings share torch's process and its CUDA libraries, so their CUDA is torch's; a
driver runs programs for its own CUDA version and for older ones. Standard library only: this file
runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

Version = tuple[int, int]

MAJORS = (12, 13)  # the tests compile the kernels with these
TORCH_MAJOR = 13  # of torch's wheels in the usual index
# The builds of torch for drivers that run CUDA 12, the newest first; cu126 has none for Blackwell.
TORCH_BUILDS = ("cu129", "cu128", "cu126")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_FIRST_DRIVER = {525: 12, 580: 13}  # branch -> CUDA major version that it is the first to run


class GpuPackagesError(Exception):
    """No CUDA packages fit this machine; the message is one line that says what to do."""


def torch_major(driver: Version | None) -> int:
    """Return the CUDA major version that torch must be built for; the driver None: unknown.

    Raises GpuPackagesError for a driver that is too old for any.
    """
    if driver is None or driver[0] >= TORCH_MAJOR:
        return TORCH_MAJOR
    if driver[0] in MAJORS:
        return driver[0]
    raise GpuPackagesError(
        f"the NVIDIA driver runs CUDA {_text(driver)} at most, {MAJORS[0]}.0 is needed: update the "
        "driver (525 or newer), or set EXTRAS=dev,load,nvrtc for the CPU alone"
    )


def cuda_extra(driver: Version | None, torch: Version | None) -> str:
    """Return the extra, `cuda12` or `cuda13`, for a driver and a torch of these CUDA versions.

    An empty string: torch has no CUDA, and the engine runs on the CPU. Raises GpuPackagesError
    where this torch does not run on this driver.
    """
    if torch is None:
        return ""
    if torch[0] not in MAJORS:
        known = " and ".join(f"CUDA {major}" for major in MAJORS)
        raise GpuPackagesError(f"torch is built for CUDA {_text(torch)}, the kernels for {known}")
    if driver is not None and driver[0] < torch[0]:
        raise GpuPackagesError(
            f"torch is built for CUDA {_text(torch)}, but the NVIDIA driver runs CUDA "
            f"{_text(driver)} at most: update the driver (580 or newer), or remove .venv and let "
            "pip find a torch for CUDA 12"
        )
    return f"cuda{torch[0]}"


def described(driver: Version | None, torch: Version | None, extra: str) -> str:
    """Return one line for the user: what was found, and what is installed for it."""
    driver_text = f"the driver runs CUDA {_text(driver)}" if driver else "the driver does not say"
    torch_text = f"torch is built for CUDA {_text(torch)}" if torch else "torch is built without"
    taken = f"cupy-{extra}x" if extra else "no CuPy, the engine runs on the CPU"
    return f"GPU: {driver_text}, {torch_text}: {taken}"


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


# ---- what this machine reports ----


def driver_cuda() -> Version | None:
    """Return the newest CUDA version that the driver runs; None: unknown.

    Sources in turn: libcuda, nvidia-smi, and the driver's branch in /proc, which gives a major
    version only.
    """
    return _of_libcuda() or _of_smi() or _of_proc()


def _of_libcuda() -> Version | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        status = library.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return read_number(number.value) if status == 0 else None


def read_number(number: int) -> Version | None:
    """Return (13, 0) for cuDriverGetVersion's 13000; None for 0, no driver."""
    return (number // 1000, number % 1000 // 10) if number else None


def _of_smi() -> Version | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program], capture_output=True, text=True, check=False, timeout=30, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_smi(done.stdout)


def read_smi(text: str) -> Version | None:
    """Return (12, 8) from nvidia-smi's table with "CUDA Version: 12.8"."""
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _of_proc() -> Version | None:
    try:
        return read_proc(DRIVER_FILE.read_text(errors="replace"))
    except OSError:
        return None


def read_proc(text: str) -> Version | None:
    """Return (12, 0) from the driver's version file with "Kernel Module  550.54.15"."""
    found = re.search(r"Kernel Module.*?\s(\d{3,})\.\d", text)
    if found is None:
        return None
    majors = [major for branch, major in _FIRST_DRIVER.items() if int(found[1]) >= branch]
    return (max(majors, default=11), 0)


def torch_cuda(venv: Path) -> Version | None:
    """Return the CUDA version that the torch in this environment is built for; None: none."""
    for path in venv.glob("lib/python3*/site-packages/torch/version.py"):
        found = re.search(r"^cuda\b.*=\s*'(\d+)\.(\d+)", path.read_text(), re.MULTILINE)
        if found:
            return (int(found[1]), int(found[2]))
    return None
