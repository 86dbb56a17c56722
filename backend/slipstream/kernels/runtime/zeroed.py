"""Zeros of which a processor takes no memory before they are written to."""

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def zeroed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, pages that the kernel gives when they are first written to.

    A cache of gigabytes is there at once so: to write zeros takes a second for each gigabyte, and
    the memory of tokens that may never come.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))
