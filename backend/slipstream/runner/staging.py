"""Copies of a step's small arrays to the device: one copy, whatever their number."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.staging.upload import Upload
from slipstream.runner.step_arrays import Array, Bytes, aligned, side_by_side

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def joined(arrays: Sequence[Array]) -> Bytes:
    """Copies, side by side in one memory."""
    memory, places = side_by_side((array.dtype, array.shape) for array in arrays)
    for place, array in zip(places, arrays, strict=True):
        place[...] = array
    return memory


class _Pinned:
    """Host memory that the device copies from."""

    def __init__(self, size: int) -> None:
        self._tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.address = self._tensor.data_ptr()
        self.bytes = self._tensor.numpy()
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class Staging:
    """Persistent buffers on both sides, the host's pinned; on a CPU nothing is copied at all.

    What `upload` returns is overwritten by the next one. Arrays go one after another to `home`; so
    each lies where it lay before if those in front of it have the same shapes. Only where `home` is
    too small, they go elsewhere. Copies go into the stream that is current when this is made.

    Args:
        device: where to.
        reserved: bytes of `home`.
    """

    def __init__(self, device: torch.device, reserved: int = 1 << 20) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cpu":
            return
        self._stream = torch.cuda.current_stream(device)
        self._upload = Upload(self._stream)
        self.home = torch.empty(reserved, dtype=torch.uint8, device=device)
        self._address, self._size = self.home.data_ptr(), reserved
        self._pinned = [_Pinned(reserved) for _ in range(2)]  # one is written, one copied

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of the host's buffers."""
        return sum(len(pinned.bytes) for pinned in self._pinned)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device, in order."""
        base = self.copy(joined(arrays))
        self.sent()
        return self.views(base, arrays)

    @staticmethod
    def views(base: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
        """Tensors of these shapes, in order, where `copy` has put them."""
        offset, tensors = 0, []
        for array in arrays:
            piece = base[offset : offset + array.nbytes].view(_DTYPES[array.dtype])
            tensors.append(piece.view(array.shape))
            offset += aligned(array.nbytes)
        return tensors

    def is_home(self, base: Tensor) -> bool:
        """Whether graphs find there what `copy`, or `upload` as the first, has returned."""
        return self._device.type != "cpu" and base.data_ptr() == self._address

    def copy(self, memory: Bytes) -> Tensor:
        """Copy it behind what the stream does; where it is then. `sent` must follow."""
        if self._device.type == "cpu":
            return torch.from_numpy(memory)
        total = len(memory)
        self._turn ^= 1
        pinned = self._pinned[self._turn]
        pinned.copied.synchronize()  # its last copy has long ended
        if total > len(pinned.bytes):
            pinned = self._pinned[self._turn] = _Pinned(2 * total)
        pinned.bytes[:total] = memory
        base, address = self.home, self._address
        if total > self._size:
            base = torch.empty(total, dtype=torch.uint8, device=self._device)
            address = base.data_ptr()
        self._upload(address, pinned.address, total)
        return base

    def sent(self) -> None:
        """Mark that the copied memory may be overwritten once the stream has come this far.

        Apart from `copy`, so that a step which is launched between the two need not wait for it.
        """
        if self._device.type != "cpu":
            self._pinned[self._turn].copied.record(self._stream)
