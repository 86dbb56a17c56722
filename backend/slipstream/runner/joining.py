"""The start of a rank: it meets the others, compares what must be the same, and loads its part."""

from typing import NamedTuple

import torch
from slipstream_runtime.ranks import RankError, RankMemory

from slipstream.errors import ConfigError
from slipstream.kernels.comm.device import DeviceRanks
from slipstream.kernels.comm.links import DeviceLinks, HostLinks, Links, Ring
from slipstream.kernels.comm.nccl import NcclError
from slipstream.kernels.comm.ranks import HostRanks, Ranks
from slipstream.runner import stage_times
from slipstream.runner.devices import ranks_asked
from slipstream.runner.facts import compare
from slipstream.runner.group import Joined
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.pipeline import StageFollower, StageLeader
from slipstream.runner.plan import Plan
from slipstream.runner.ranks import Follower, Leader


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
    plan: Plan  # of the layers that ranks agreed on


def start(plan: Plan, memory: RankMemory) -> Started:
    """Load a rank's part of the model, together with all others, with which it shares `memory`.

    Raises `ConfigError` if they differ in what must be the same, `CheckpointError`.
    """
    compare(plan, memory)
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
    return Started(runner, plan)


def make_runner(plan: Plan, memory: RankMemory | None) -> tuple[Plan, ModelRunner]:
    """Return the runner of the engine's process, rank 0 of several or the only one, and its plan.

    `memory` is what ranks share. Raises `ConfigError`, `CheckpointError`.
    """
    if plan.config.num_ranks == 1:
        return plan, ModelRunner(plan)
    if memory is None:
        raise ConfigError(f"{ranks_asked(plan.config)} needs a supervisor that starts the ranks")
    runner, plan = start(plan, memory)
    return plan, runner
