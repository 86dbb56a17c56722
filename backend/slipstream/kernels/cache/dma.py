"""Copies of whole blocks between the cache and page-locked host memory, by the GPU's copy engine.

A block's parts lie far apart in the cache and side by side in host memory. To the driver they are
one copy of three dimensions, which runs at PCIe's full bandwidth and costs the host 3 us; part by
part it would be half of that bandwidth. A kernel reaches 95 % of it, but its CTAs hold
multiprocessors for which a step's kernels then wait.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.kernels.runtime import jit


class BlockDma:
    """Copies in one direction. The tensors must outlive them.

    Args:
        cache: `[part, block, ...]`, contiguous, on the device.
        slots: `[slot, part, ...]`, contiguous, page-locked.
        is_out: from the cache to the slots.
        stream: in which the copies go.
    """

    def __init__(
        self, cache: Tensor, slots: Tensor, is_out: bool, stream: torch.cuda.Stream
    ) -> None:
        from cuda.bindings import driver

        num_parts, num_blocks = cache.shape[:2]
        self._part_bytes = size = cache[0, 0].nbytes
        self._slot_bytes = slots[0].nbytes
        jit.require(cache.is_contiguous() and slots.is_contiguous(), "dma: not contiguous")
        jit.require(self._slot_bytes == num_parts * size, "dma: a slot does not hold a block")
        self._driver, self._stream = driver, driver.CUstream(stream.cuda_stream)
        self._cache, self._slots = cache.data_ptr(), slots.data_ptr()
        self._is_out = is_out
        self._copy = copy = driver.CUDA_MEMCPY3D()
        # A row is a part of a block, a slice a part of all blocks, or of one slot.
        copy.WidthInBytes, copy.Height, copy.Depth = size, 1, num_parts
        copy.srcPitch = copy.dstPitch = size
        kinds = driver.CUmemorytype
        device, host = kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_HOST
        if is_out:
            copy.srcMemoryType, copy.dstMemoryType = device, host
            copy.srcHeight, copy.dstHeight = num_blocks, 1
        else:
            copy.srcMemoryType, copy.dstMemoryType = host, device
            copy.srcHeight, copy.dstHeight = 1, num_blocks

    def __call__(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Put copies from block to slot, or from slot to block, into the stream."""
        copy, run = self._copy, self._driver.cuMemcpy3DAsync
        for source, destination in pairs:
            if self._is_out:
                copy.srcDevice = self._cache + source * self._part_bytes
                copy.dstHost = self._slots + destination * self._slot_bytes
            else:
                copy.srcHost = self._slots + source * self._slot_bytes
                copy.dstDevice = self._cache + destination * self._part_bytes
            (status,) = run(copy, self._stream)
            jit.require(int(status) == 0, f"dma: CUDA error {int(status)}")
