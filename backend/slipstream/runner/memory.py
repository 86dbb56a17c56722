"""The number of blocks of the KV cache: weights and the largest step leave room for so many.

A step allocates nothing that the largest one did not: torch keeps what that one took. So it is run
once before the cache is made, and what the device has free afterwards is free for good.
"""

from collections.abc import Callable, Sequence

import torch

from slipstream.errors import ConfigError
from slipstream.runner.devices import total_memory
from slipstream.runner.plan import Plan

_SHARE = 0.9  # of what is left; the rest is for fragments, modules loaded later, other processes
_CPU_TOKENS = 65_536  # default on a CPU, where the cache is not the limit


def num_blocks(plan: Plan, free: int) -> int:
    """Blocks of the cache with `free` bytes left for it and for whatever comes later.

    Raises `ConfigError` if that is none, or fewer than `kv_cache_tokens` asks for.
    """
    free = max(0, int(_SHARE * free))
    asked = plan.config.kv_cache_tokens
    if asked is not None:
        wanted = plan.blocks_of(asked)
        if wanted * plan.block_bytes > free:
            raise ConfigError(
                f"kv_cache_tokens = {asked} takes {wanted * plan.block_bytes / 1e9:.2f} GB, but "
                f"{free / 1e9:.2f} GB are free for the cache"
            )
        return wanted
    count = free // plan.block_bytes
    share = plan.config.memory_share
    if share is not None and count < plan.held_blocks:
        raise ConfigError(
            f"memory_share = {share:g} leaves {free / 1e9:.2f} GB for the KV cache, but "
            f"{plan.longest} takes {plan.held_blocks * plan.block_bytes / 1e9:.2f} GB: more of it, "
            "or a smaller max_model_len, would do"
        )
    if plan.device.type == "cpu":
        count = min(count, plan.blocks_of(_CPU_TOKENS))
    least = plan.window.num_tables
    if count < least:
        raise ConfigError(
            f"no memory is left for the KV cache: {free / 1e9:.2f} GB free for it, a block of "
            f"{plan.block_size} tokens takes {least * plan.block_bytes / 1e9:.3f} GB"
        )
    # More than every sequence at its longest can never be used.
    return min(count, plan.max_num_seqs * plan.held_blocks)


def default_pool(free: int, device: torch.device) -> int:
    """Bytes for adapters, of `free` that the cache is made of, unless `adapter_memory` says.

    On a GPU half of the tenth that the cache leaves. On a CPU, whose memory is taken only as it is
    used and where the cache is not the limit, half.
    """
    return int(free * (0.5 if device.type == "cpu" else (1 - _SHARE) / 2))


def left_in_share(plan: Plan, before: int, left: int) -> int:
    """Bytes left for the cache, on the device and in the engine's share of it.

    `before` were free on a GPU before the engine took any, `left` are beside weights and workspace.
    """
    share = plan.config.memory_share
    if share is None:
        return left
    taken = before - left if plan.device.type == "cuda" else plan.weight_bytes
    return within_share(share, total_memory(plan.device), taken, left)


def within_share(share: float, total: int, taken: int, left: int) -> int:
    """Return how many of `left` bytes an engine may take that has a share of `total` bytes."""
    return max(0, min(left, int(share * total) - taken))


def left_on_gpu(
    device: torch.device, largest: Callable[[], object], with_graphs: Sequence[Callable[[], object]]
) -> int:
    """Bytes of the device free after steps of the largest kinds, less what graphs will take.

    Graphs are of steps no larger than those of `with_graphs`. They share one pool of memory, beside
    that of all other steps. What loading and packing freed is the device's again.
    """
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for step in with_graphs:
        step()
    in_graphs = torch.cuda.max_memory_allocated(device) - before
    largest()
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0] - in_graphs
