"""NCCL through its C interface: sums of large tensors over GPUs, and states from one to another."""

import ctypes
import os
from collections.abc import Callable, Mapping

import torch
from slipstream_runtime.interfaces import interface_of
from slipstream_runtime.span import address_here, host_name
from torch import Tensor

_ID_BYTES = 128
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t
_SUM = 0
_INTERFACE = "NCCL_SOCKET_IFNAME"


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
    for name in ("ncclSend", "ncclRecv"):
        getattr(found, name).argtypes = [*pointers[:1], *numbers, *pointers]
    return found


def is_available() -> bool:
    """Whether this process has NCCL."""
    return _library() is not None


def _where(rank: int) -> str:
    return f"rank {rank} on {host_name()}"


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what NCCL is set to where the environment does not say otherwise.

    It meets on the loopback where all ranks are of one host: no port that others reach. Else on the
    interface by which other hosts reach this one; NCCL chooses where none has that address.
    """
    found = {"NCCL_NVLS_ENABLE": "0"}  # multicast: it is not needed, and often not to be had
    if (address := address_here(environment)) is None:
        found[_INTERFACE] = "lo"
    elif (name := interface_of(address)) is not None:
        found[_INTERFACE] = f"={name}"  # this one alone, not those whose names begin so
    return {each: value for each, value in found.items() if each not in environment}


def _loaded(where: str) -> ctypes.CDLL:
    """Return the library, set up; raises `NcclError`."""
    library = _library()
    if library is None:
        raise NcclError(f"{where}: libnccl.so.2 is not there")
    os.environ.update(settings_of(os.environ))
    return library


def _reason(library: ctypes.CDLL, status: int) -> str:
    words = library.ncclGetErrorString(status), library.ncclGetLastError(None)
    return ": ".join(text.decode(errors="replace").strip() for text in words if text)


class Nccl:
    """A communicator of all ranks, each of which makes it at the same time.

    Args:
        rank, size: of this process, and of all.
        spread: gives every rank the bytes that rank 0 has.
        name: of this rank, in errors; None: `rank`.
    """

    def __init__(
        self, rank: int, size: int, spread: Callable[[bytes], bytes], name: int | None = None
    ) -> None:
        self._where = _where(rank if name is None else name)
        self._library = library = _loaded(self._where)
        own = bytes(_ID_BYTES)
        if rank == 0 and name is None:
            own = self.new_id(rank)
        shared = _Id.from_buffer_copy(spread(own))
        self._communicator = ctypes.c_void_p()
        made = library.ncclCommInitRank(ctypes.byref(self._communicator), size, shared, rank)
        self._check("ncclCommInitRank", made)

    @staticmethod
    def new_id(rank: int) -> bytes:
        """Return what the ranks of a new communicator must share; `rank` is named in errors."""
        library, own = _loaded(_where(rank)), _Id()
        status = library.ncclGetUniqueId(ctypes.byref(own))
        if status != 0:
            raise NcclError(f"{_where(rank)}: ncclGetUniqueId: {_reason(library, status)}")
        return ctypes.string_at(ctypes.byref(own), _ID_BYTES)

    def send(self, x: Tensor, to: int) -> None:
        """Send `x`, contiguous, to a rank, on the current stream."""
        self._pass("ncclSend", x, to)

    def receive(self, out: Tensor, of: int) -> None:
        """Receive into `out`, contiguous, what a rank sends, on the current stream."""
        self._pass("ncclRecv", out, of)

    def _pass(self, call: str, x: Tensor, other: int) -> None:
        stream = torch.cuda.current_stream(x.device).cuda_stream
        what = (x.data_ptr(), x.numel(), _TYPES[x.dtype], other)
        status = getattr(self._library, call)(*what, self._communicator, stream)
        self._check(f"{call} of {x.nbytes} bytes", status)

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
                return f"{self._where}: {_reason(self._library, each)}"
        return None

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            raise NcclError(f"{self._where}: {call}: {_reason(self._library, status)}")
