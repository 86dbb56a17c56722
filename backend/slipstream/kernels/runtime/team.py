"""Teams of CTAs, as in team.cuh."""

import functools

import torch

from slipstream.kernels.runtime.registry import Target

THREADS = 512  # of a CTA


@functools.cache
def team_size(device: int) -> int:
    """Return the number of CTAs of a team on the device of this index."""
    return _size(torch.cuda.get_device_capability(device))


def has_teams(target: Target) -> bool:
    """Whether a team is more than one CTA on a device."""
    return _size(target.capability) > 1


def _size(capability: tuple[int, int]) -> int:
    return 8 if capability >= (9, 0) else 1
