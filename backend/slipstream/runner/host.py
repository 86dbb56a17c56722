"""The processor of this host, and what was measured on it, kept on disk."""

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from slipstream import __version__
from slipstream.kernels.cpu.native import library
from slipstream.kernels.runtime import disk_cache

# Of blocks' matrices: with fewer a step is over before a thread wakes, and nothing is worth a file.
MIN_ELEMENTS = 1 << 24
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Cores(NamedTuple):
    """Physical cores that this process may use, and the most of them in one memory node."""

    all: int
    of_node: int


def cores(allowed: frozenset[int], cpus: Path = _CPUS, nodes: Path = _NODES) -> Cores:
    """Count cores by the kernel's topology; processors of unknown place are a core each."""
    found = {cpu: _core_of(cpus / f"cpu{cpu}" / "topology", cpu) for cpu in allowed}
    of_nodes = [
        len({found[cpu] for cpu in _listed(path) & allowed}) for path in nodes.glob("node*/cpulist")
    ]
    total = len(set(found.values()))
    return Cores(total, max(of_nodes, default=0) or total)


def cores_here() -> Cores:
    """`cores` of this process, within what its container may use."""
    found = cores(frozenset(os.sched_getaffinity(0)))
    text = _QUOTA.read_text().split() if _QUOTA.is_file() else ["max"]
    if text[0] == "max":
        return found
    quota = max(1, math.ceil(int(text[0]) / int(text[1])))
    return Cores(min(found.all, quota), min(found.of_node, quota))


def _core_of(topology: Path, cpu: int) -> tuple[str, str]:
    try:
        package = (topology / "physical_package_id").read_text().strip()
        return package, (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)


def _listed(path: Path) -> frozenset[int]:
    """Read a list of processors as the kernel writes it: `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, path.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def is_busy(count: int) -> bool:
    """Whether so many cores were all in use in the last minute: nothing is measured well then."""
    return os.getloadavg()[0] > count


@functools.cache
def facts() -> dict[str, object]:
    """Return what measurements on this host depend on, whatever is measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    kernels = library()
    return {
        "processor": names[0] if names else "",
        "cores": cores_here(),
        "kernels": "none" if kernels is None else kernels.form,
        "versions": [__version__, str(torch.__version__)],
    }


class Kept:
    """A result that is measured once: for the facts of the host, and `what` is measured."""

    def __init__(self, kind: str, what: Mapping[str, object]) -> None:
        text = json.dumps([facts(), what], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = disk_cache.folder("cpu") / f"{kind}-{digest}.json"

    def read(self) -> dict[str, object] | None:
        """Return the result; None where there is none that can be read."""
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, result: Mapping[str, object]) -> str:
        """Keep a result; return where, in words."""
        try:
            disk_cache.write_whole(self.path, json.dumps(result).encode())
        except OSError as error:
            return f"not kept: {error.strerror}"
        return f"kept in {self.path}"
