"""The device of a rank, and its memory: what it has, and what is to be had of it."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch
from slipstream_runtime.ranks import MAX_RANKS
from slipstream_runtime.span import place_here

from slipstream.config import MAX_REPLICAS, EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.runtime.jit import MIN_CAPABILITY

_CGROUP = Path("/sys/fs/cgroup")


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank; raises `ConfigError` if the machine has none such."""
    has_cuda = torch.cuda.is_available()
    if config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {config.device!r} is not one of auto, cpu, cuda")
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device = 'cuda', but torch sees no GPU")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    num_gpus, size = torch.cuda.device_count(), config.tensor_parallel
    here, count = place_here(rank, os.environ)
    if count is not None and count % size:
        raise ConfigError(
            f"tensor_parallel = {size}: rank {rank} is on a host with {count} ranks; GPUs that "
            "share every matrix must be in one host"
        )
    needed = config.num_ranks if count is None else count
    if num_gpus < needed and config.num_ranks > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"{ranks_asked(config)} needs {'as many' if count is None else needed} GPUs, "
            "but torch sees "
            f"{num_gpus} (CUDA_VISIBLE_DEVICES {'is not set' if visible is None else visible!r})"
        )
    return torch.device("cuda", here)


def ranks_asked(config: EngineConfig) -> str:
    """Return the fields that ask for several ranks, in words."""
    asked = f"tensor_parallel = {config.tensor_parallel}"
    if config.pipeline_parallel == 1:
        return asked
    stages = f"pipeline_parallel = {config.pipeline_parallel}"
    return stages if config.tensor_parallel == 1 else f"{stages} with {asked}"


def check_rank_counts(config: EngineConfig) -> None:
    """Raise `ConfigError` if there may not be so many replicas or ranks."""
    limits = {
        "replicas": MAX_REPLICAS,
        "tensor_parallel": MAX_RANKS,
        "pipeline_parallel": MAX_RANKS,
    }
    for field, most in limits.items():
        if not 1 <= (value := getattr(config, field)) <= most:
            bound = f"above {most}" if value > 1 else "below 1"
            raise ConfigError(f"{field} = {value} is {bound}")
    if config.num_ranks > MAX_RANKS:
        raise ConfigError(f"{ranks_asked(config)}: {config.num_ranks} ranks are above {MAX_RANKS}")


def check_gpu(device: torch.device) -> None:
    """Raise `ConfigError` if the GPU or the packages are not what the kernels need."""
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"device = 'cuda': {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability}, the kernels need {MIN_CAPABILITY}; device = 'cpu' works"
        )
    if any(find_spec(name) is None for name in ("cupy", "cuda")):
        raise ConfigError(
            "device = 'cuda', but CuPy or cuda-bindings is not installed: "
            "pip install 'slipstream[engine,cuda13]' (or cuda12); device = 'cpu' works without"
        )


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
