"""NCCL through its C interface: sums of large tensors over the GPUs of one host."""

import ctypes
import os
from collections.abc import Callable

import torch
from torch import Tensor

_ID_BYTES = 128
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t
_SUM = 0
_SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",  # multicast: nothing here needs it, and it is often not to be had
    "NCCL_SOCKET_IFNAME": "lo",  # ranks of one host: no port that others reach
}


class NcclError(RuntimeError):
    """A call that NCCL refused; its connections are then of no use."""


class _Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * _ID_BYTES)]


def _library() -> ctypes.CDLL | None:
    """Return the library that torch has loaded; None: it has none."""
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    found.ncclGetErrorString.restype = ctypes.c_char_p
    found.ncclGetLastError.restype = ctypes.c_char_p
    found.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _Id, ctypes.c_int]
    pointers, numbers = [ctypes.c_void_p] * 2, [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    found.ncclAllReduce.argtypes = [*pointers, *numbers, ctypes.c_void_p, ctypes.c_void_p]
    return found


def is_available() -> bool:
    """Whether this process has NCCL."""
    return _library() is not None


class Nccl:
    """A communicator of all ranks, each of which makes it at the same time.

    Args:
        rank, size: of this process, and of all.
        spread: gives every rank the bytes that rank 0 has.
    """

    def __init__(self, rank: int, size: int, spread: Callable[[bytes], bytes]) -> None:
        library = _library()
        if library is None:
            raise NcclError(f"rank {rank} on {os.uname().nodename}: libnccl.so.2 is not there")
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self._library = library
        self._where = f"rank {rank} on {os.uname().nodename}"
        own = _Id()
        if rank == 0:
            self._check("ncclGetUniqueId", library.ncclGetUniqueId(ctypes.byref(own)))
        shared = _Id.from_buffer_copy(spread(ctypes.string_at(ctypes.byref(own), _ID_BYTES)))
        self._communicator = ctypes.c_void_p()
        made = library.ncclCommInitRank(ctypes.byref(self._communicator), size, shared, rank)
        self._check("ncclCommInitRank", made)

    def sum(self, x: Tensor, out: Tensor) -> None:
        """Write the sum of all ranks' `x`, contiguous, on the current stream; `out` may be it."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        where = (x.data_ptr(), out.data_ptr(), x.numel(), _TYPES[x.dtype], _SUM)
        status = self._library.ncclAllReduce(*where, self._communicator, stream)
        self._check(f"ncclAllReduce of {x.nbytes} bytes", status)

    def error(self) -> str | None:
        """Return what has failed behind a call that was accepted; None: nothing has."""
        status = ctypes.c_int(0)
        found = self._library.ncclCommGetAsyncError(self._communicator, ctypes.byref(status))
        for each in (found, status.value):
            if each not in (0, 7):  # ncclSuccess, ncclInProgress
                return f"{self._where}: {self._reason(each)}"
        return None

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            raise NcclError(f"{self._where}: {call}: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        words = self._library.ncclGetErrorString(status), self._library.ncclGetLastError(None)
        return ": ".join(text.decode(errors="replace").strip() for text in words if text)
