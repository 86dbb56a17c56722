"""A step's small arrays on their way to the device: one copy, whatever their number."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.arrays import Array

_ALIGNMENT = 16  # bytes
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def num_bytes(arrays: Sequence[Array]) -> int:
    """What they take in a `Staging`."""
    return sum(_aligned(array.nbytes) for array in arrays)


class Staging:
    """Persistent buffers on both sides, the host's pinned; on a CPU nothing is copied at all.

    What `upload` returns is overwritten by the next `upload`. Arrays of the same shapes go to the
    same addresses as before, unless others that needed more than `reserved` bytes came between.
    """

    def __init__(self, device: torch.device, reserved: int = 1 << 20) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None  # the host's buffer may be written again
        self._reserve(reserved)

    def _reserve(self, size: int) -> None:
        if self._device.type == "cpu":
            return
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._on_device = torch.empty(size, dtype=torch.uint8, device=self._device)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device, in order."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        self.copy(arrays)
        offset, tensors = 0, []
        for array in arrays:
            piece = self._on_device[offset : offset + array.nbytes].view(_DTYPES[array.dtype.name])
            tensors.append(piece.view(array.shape))
            offset += _aligned(array.nbytes)
        return tensors

    def copy(self, arrays: Sequence[Array]) -> None:
        """`upload` for those who know already where arrays of these shapes go."""
        # A step that samples nothing is not waited for: its copy may still read the host's buffer.
        if self._copied is not None:
            self._copied.synchronize()
        total = num_bytes(arrays)
        if total > len(self._host):
            self._reserve(2 * total)
        host, offset = self._host.numpy(), 0
        for array in arrays:
            piece = host[offset : offset + array.nbytes]
            piece[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            offset += _aligned(array.nbytes)
        self._on_device[:total].copy_(self._host[:total], non_blocking=True)
        self._copied = torch.cuda.current_stream(self._device).record_event()
