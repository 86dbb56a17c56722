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
    return sum([_aligned(array.nbytes) for array in arrays])


class _Pinned:
    """Host memory that the device copies from."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.tensor.numpy()
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class Staging:
    """Persistent buffers on both sides, the host's pinned; on a CPU nothing is copied at all.

    What `upload` returns is overwritten by the next one. Arrays go one after another to `home`; so
    each lies where it lay before if those in front of it have the same shapes. Only where `home` is
    too small, they go elsewhere.

    Args:
        device: where to.
        reserved: bytes of `home`.
    """

    def __init__(self, device: torch.device, reserved: int = 1 << 20) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cpu":
            return
        self.home = torch.empty(reserved, dtype=torch.uint8, device=device)
        self._pinned = [_Pinned(reserved) for _ in range(2)]  # one is written, one copied

    @property
    def num_pinned_bytes(self) -> int:
        """Of the host's buffers."""
        return sum(len(pinned.bytes) for pinned in self._pinned)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device, in order."""
        if self._device.type == "cpu":
            return [torch.from_numpy(np.require(array, requirements="W")) for array in arrays]
        return self.views(self.copy(arrays), arrays)

    @staticmethod
    def views(base: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
        """Tensors of these shapes, in order, where `copy` has put them."""
        offset, tensors = 0, []
        for array in arrays:
            piece = base[offset : offset + array.nbytes].view(_DTYPES[array.dtype.name])
            tensors.append(piece.view(array.shape))
            offset += _aligned(array.nbytes)
        return tensors

    def copy(self, arrays: Sequence[Array]) -> Tensor:
        """Copy them behind what the stream does; the memory they go to."""
        total = num_bytes(arrays)
        self._turn ^= 1
        pinned = self._pinned[self._turn]
        pinned.copied.synchronize()  # its last copy has long ended
        if total > len(pinned.bytes):
            pinned = self._pinned[self._turn] = _Pinned(2 * total)
        host, offset = pinned.bytes, 0
        for array in arrays:
            size = array.nbytes
            host[offset : offset + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            offset += _aligned(size)
        base = self.home
        if total > len(base):
            base = torch.empty(total, dtype=torch.uint8, device=self._device)
        base[:total].copy_(pinned.tensor[:total], non_blocking=True)
        pinned.copied.record(torch.cuda.current_stream(self._device))
        return base
