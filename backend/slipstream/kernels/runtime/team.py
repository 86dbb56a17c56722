"""Teams of CTAs, as in team.cuh."""

import functools

import torch

THREADS = 512  # of a CTA


@functools.cache
def team_size(device: int) -> int:
    """Return the number of CTAs of a team on the device of this index."""
    return 8 if torch.cuda.get_device_capability(device) >= (9, 0) else 1
