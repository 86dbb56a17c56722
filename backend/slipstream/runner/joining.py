"""The start of a rank: it meets the others, compares what must be the same, and loads its part."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from slipstream_runtime.ranks import RankError, RankMemory

from slipstream import __version__
from slipstream.errors import ConfigError
from slipstream.kernels.comm.device import DeviceRanks
from slipstream.kernels.comm.links import DeviceLinks, HostLinks, Links, Ring
from slipstream.kernels.comm.nccl import NcclError
from slipstream.kernels.comm.ranks import HostRanks, Ranks
from slipstream.runner import stage_times
from slipstream.runner.devices import ranks_asked
from slipstream.runner.group import Joined
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.pipeline import StageFollower, StageLeader
from slipstream.runner.plan import Plan
from slipstream.runner.ranks import Follower, Leader

_END_BYTES = 1 << 18  # of each end of a file


def join(plan: Plan, memory: RankMemory) -> Joined:
    """Connect with the other ranks, all of which are here."""
    num_stages = plan.model.num_stages
    itemsize, has_sources = plan.dtype.itemsize, plan.max_in_flight > 1 and num_stages == 1
    if num_stages == 1:
        return Joined(memory, _ranks_of(plan, memory, None), itemsize, has_sources)
    ring = Ring(plan.rank, memory.size, num_stages)
    ranks = _ranks_of(plan, memory, ring)
    return Joined(memory, ranks, itemsize, has_sources, _links_of(plan, memory, ring))


def _ranks_of(plan: Plan, memory: RankMemory, ring: Ring | None) -> Ranks:
    """Return those of the whole model, or of this rank's stage."""
    members = None if ring is None else ring.members
    if plan.device.type == "cpu" or plan.config.tensor_parallel == 1:
        return HostRanks(memory, members)
    torch.cuda.set_device(plan.device)
    try:
        return DeviceRanks(memory, plan.device, plan.config.deterministic, members)
    except (RankError, NcclError) as error:
        raise ConfigError(f"{ranks_asked(plan.config)}: {error}") from error


def _links_of(plan: Plan, memory: RankMemory, ring: Ring) -> Links:
    if plan.device.type == "cpu":
        return HostLinks(memory, ring)
    torch.cuda.set_device(plan.device)
    try:
        return DeviceLinks(memory, ring, plan.device)
    except NcclError as error:
        raise ConfigError(f"{ranks_asked(plan.config)}: {error}") from error


class Started(NamedTuple):
    """A rank that has met all others."""

    runner: Leader | Follower
    memory: RankMemory
    plan: Plan  # of the layers that ranks agreed on


def start(plan: Plan, descriptor: int) -> Started:
    """Load a rank's part of the model, together with all others.

    Raises `ConfigError` if they differ in what must be the same, `CheckpointError`.
    """
    memory = RankMemory(descriptor, plan.config.num_ranks, plan.rank)
    _compare(plan, memory)
    if plan.model.num_stages > 1:
        plan = stage_times.agreed(plan, memory)
    group = join(plan, memory)
    runner: Leader | Follower
    if plan.model.num_stages > 1:
        runner = StageFollower(plan, group) if plan.rank else StageLeader(plan, group)
    else:
        runner = Follower(plan, group) if plan.rank else Leader(plan, group)
    memory.meet()
    group.start(plan.config.stuck_after_s)
    return Started(runner, memory, plan)


def make_runner(plan: Plan, descriptor: int | None) -> tuple[Plan, ModelRunner]:
    """Return the runner of the engine's process, rank 0 of several or the only one, and its plan.

    `descriptor` is that of the memory that ranks share. Raises `ConfigError`, `CheckpointError`.
    """
    if plan.config.num_ranks == 1:
        return plan, ModelRunner(plan)
    if descriptor is None:
        raise ConfigError(f"{ranks_asked(plan.config)} needs a supervisor that starts the ranks")
    runner, memory, plan = start(plan, descriptor)
    memory.beat_forever()
    return plan, runner


def facts_of(plan: Plan) -> dict[str, str]:
    """Return what must be the same on all ranks, by name."""
    files = hashlib.sha256()
    for path in sorted(plan.checkpoint.iterdir()):
        if path.is_file():
            files.update(f"{path.name} {path.stat().st_size}\n".encode())
            files.update(_ends(path))
    here = msgspec.structs.replace(plan.config, checkpoint="", draft_checkpoint="")
    settings = hashlib.sha256(msgspec.json.encode(here))
    return {
        "version": __version__,
        "version of torch": str(torch.__version__),
        "files of the checkpoint": f"{_name(plan.checkpoint)} {files.hexdigest()[:16]}",
        "settings": settings.hexdigest()[:16],
        "device": _device(plan),
        "dtype": str(plan.dtype).removeprefix("torch."),
    }


def _ends(path: Path) -> bytes:
    """Return the first and last bytes of a file: of weights, all names and shapes, and some values.

    Times of a file differ where hosts have copies of their own.
    """
    with path.open("rb") as file:
        first = file.read(_END_BYTES)
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        return first + file.read(_END_BYTES)


def _device(plan: Plan) -> str:
    """Return the kind of the device: ranks of different GPUs would wait for the slowest."""
    is_cuda = plan.device.type == "cuda"
    return torch.cuda.get_device_name(plan.device) if is_cuda else plan.device.type


def _name(path: Path) -> str:
    return path.resolve().name[:200]


def _compare(plan: Plan, memory: RankMemory) -> None:
    """Raise `ConfigError` with the name of the first fact in which a rank differs from rank 0."""
    own = msgspec.json.encode(facts_of(plan))
    first, *others = [
        msgspec.json.decode(facts, type=dict[str, str]) for facts in memory.gather(own)
    ]
    for rank, facts in enumerate(others, start=1):
        for name, value in first.items():
            if facts.get(name) != value:
                raise ConfigError(
                    f"{memory.name(rank)} has another {name} than rank 0: "
                    f"{facts.get(name)}, not {value}"
                )
