"""The memory of a device: what it has, and what is to be had of it."""

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_on_host() -> int:
    """Bytes of host memory to be had: what the kernel says, within what the container may use."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        available = 1024 * int(fields["MemAvailable"].split()[0])
    limit, used = _limit(), _CGROUP / "memory.current"
    if limit is not None and used.is_file():
        available = min(available, limit - int(used.read_text()))
    return available


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU, or of the host within what the container may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _limit()
    return total if limit is None else min(total, limit)


def free_on_gpu(device: torch.device) -> int:
    """Bytes that are free on a GPU; 0 for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _limit() -> int | None:
    """Return the bytes that the container may use; None: no bound."""
    path = _CGROUP / "memory.max"
    text = path.read_text().strip() if path.is_file() else "max"
    return None if text == "max" else int(text)
