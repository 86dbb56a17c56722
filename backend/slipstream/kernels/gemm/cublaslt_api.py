"""libcublasLt through ctypes: the part of its C interface that a GEMM needs.

cuBLASLt counts columns first: our row-major `[rows, width]` is its `[width, rows]`. So `x W^T` is
written as `W^T x` with `W` transposed, the one form that takes fp8 too. A failed call raises
`KernelError`.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.runtime import tape
from slipstream.kernels.runtime.op import KernelError

WORKSPACE = 32 << 20  # bytes that an algorithm may ask for
NOT_SUPPORTED = 15  # the status for a shape or layout that has no algorithm

_DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.int8: 3,
    torch.int32: 10,
}
_IN_FP32 = (68, 0)  # types of sums, and of what they are multiplied by
_IN_INT32 = (72, 10)
_TRANSPOSE_A, _FAST_ACCUMULATION = 3, 25  # of a description
_SCALE_POINTERS, _SCALE_MODES = (17, 18), (31, 32)  # likewise, of A (the weights) and of B (x)
# By `GemmShape.x_scales`; 4 is an f32 for 128 inputs of a row, 5 for 128 inputs of 128 rows.
_MODES = {"rows": (4, 4), "blocks": (4, 5)}
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # of a preference
_REDUCE_IN_FP32 = 2
# Of an algorithm: name -> (number, type).
_ATTRIBUTES: dict[str, tuple[int, type[ctypes.c_uint32] | type[ctypes.c_uint16]]] = {
    "tile": (1, ctypes.c_uint32),
    "splits": (2, ctypes.c_uint32),
    "reduction": (3, ctypes.c_uint32),
    "swizzle": (4, ctypes.c_uint32),
    "custom": (5, ctypes.c_uint32),
    "cluster": (8, ctypes.c_uint16),
}
_TILE_IDS = 6  # of an algorithm's capabilities
_MAX_TILES = 1024
_Blob = ctypes.c_uint64 * 8
# 0 and 1 in either type, read by the host when a product is launched.
_FLOATS, _INTEGERS = (ctypes.c_float * 2)(0, 1), (ctypes.c_int32 * 2)(0, 1)


class _Result(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Blob),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtMatmulDescCreate": (_POINTER, _INT, _INT),
    "cublasLtMatmulDescSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulDescDestroy": (_POINTER,),
    "cublasLtMatrixLayoutCreate": (_POINTER, _INT, *(ctypes.c_uint64,) * 2, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceCreate": (_POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulPreferenceDestroy": (_POINTER,),
    "cublasLtMatmulAlgoGetHeuristic": (*(_POINTER,) * 7, _INT, _POINTER, _POINTER),
    "cublasLtMatmulAlgoCheck": (_POINTER,) * 8,
    "cublasLtMatmulAlgoConfigGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, _POINTER),
    "cublasLtMatmulAlgoConfigSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulAlgoCapGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, _POINTER),
    "cublasLtMatmul": (*(_POINTER,) * 14, _SIZE, _POINTER),
}


@functools.cache
def library() -> Any:
    """Return the functions, typed. torch has loaded the library; its name gives the same one."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libcublasLt.so.{major}"
    try:
        loaded = ctypes.CDLL(name)
    except OSError as error:
        raise KernelError(f"{name}, which comes with torch, cannot be loaded: {error}") from None
    for function, arguments in _FUNCTIONS.items():
        getattr(loaded, function).argtypes = arguments
        getattr(loaded, function).restype = ctypes.c_int
    loaded.cublasLtGetVersion.restype = ctypes.c_size_t
    return loaded


def version() -> int:
    """Return the version of cuBLASLt: 130100 is 13.1."""
    return int(library().cublasLtGetVersion())


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)), f"cublasLtCreate on cuda:{device}")
    return handle


def _check(status: int, what: str) -> None:
    if status != 0:
        raise KernelError(f"{what}: cuBLASLt status {status}")


# ---- algorithms ----


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kernel and how it is launched, as cuBLASLt writes it down; for one version of it only."""

    blob: bytes  # 64
    workspace: int  # bytes

    def read(self, name: str) -> int:
        """Read an attribute: tile, splits, reduction, swizzle, custom, cluster."""
        number, kind = _ATTRIBUTES[name]
        value = kind()
        blob, written = _Blob.from_buffer_copy(self.blob), ctypes.c_size_t()
        status = library().cublasLtMatmulAlgoConfigGetAttribute(
            blob, number, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)
        )
        _check(status, f"reading {name} of an algorithm")
        return int(value.value)

    def changed(self, **attributes: int) -> bytes:
        """Return the blob with other attributes; `Problem.algorithm_of` says if it is valid."""
        blob = _Blob.from_buffer_copy(self.blob)
        for name, wanted in attributes.items():
            number, kind = _ATTRIBUTES[name]
            value = kind(wanted)
            status = library().cublasLtMatmulAlgoConfigSetAttribute(
                blob, number, ctypes.byref(value), ctypes.sizeof(value)
            )
            _check(status, f"setting {name} = {wanted} of an algorithm")
        return bytes(blob)

    def tiles(self) -> list[int]:
        """The numbers of the tiles that its kind of kernel may be built with."""
        blob, written = _Blob.from_buffer_copy(self.blob), ctypes.c_size_t()
        numbers = (ctypes.c_uint32 * _MAX_TILES)()
        status = library().cublasLtMatmulAlgoCapGetAttribute(
            blob, _TILE_IDS, numbers, ctypes.sizeof(numbers), ctypes.byref(written)
        )
        _check(status, "reading the tiles of an algorithm")
        return list(numbers)[: written.value // ctypes.sizeof(ctypes.c_uint32)]


# ---- GEMMs ----


@dataclass(frozen=True, slots=True)
class GemmShape:
    """`out [rows, outputs] = x [rows, inputs] weight [outputs, inputs]^T` as it lies in memory.

    Or `+=`, if it adds.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype  # of x and weight
    out_dtype: torch.dtype
    strides: tuple[int, int, int]  # elements from a row to the next, of x, weight and out
    alignment: int  # bytes, of all three
    adds: bool
    # "rows", "blocks": of e4m3 the weights have a scale for each 128 inputs of a row, and x has one
    # for 128 inputs of a row, or of 128 rows.
    x_scales: str = ""

    def __str__(self) -> str:
        types = f"{self.dtype}".removeprefix("torch.")
        if self.out_dtype != self.dtype:
            types += f" to {self.out_dtype}".replace("torch.", "")
        more = " added" if self.adds else ""
        more += f" scaled by groups and {self.x_scales}" if self.x_scales else ""
        return f"[{self.rows}, {self.inputs}] x [{self.outputs}, {self.inputs}]^T{more}, {types}"


class Problem:
    """The descriptors of one shape on one device."""

    def __init__(self, shape: GemmShape, device: int) -> None:
        self.shape = shape
        self.device = device
        self._library = library()
        self._handle = _handle(device)
        self._description = self._describe()
        x_stride, weight_stride, out_stride = shape.strides
        self._weight = self._layout(shape.dtype, shape.inputs, shape.outputs, weight_stride)
        self._x = self._layout(shape.dtype, shape.inputs, shape.rows, x_stride)
        self._out = self._layout(shape.out_dtype, shape.outputs, shape.rows, out_stride)

    def _describe(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        types = _IN_INT32 if self.shape.dtype == torch.int8 else _IN_FP32
        status = self._library.cublasLtMatmulDescCreate(ctypes.byref(made), *types)
        _check(status, str(self.shape))
        weakref.finalize(self, self._library.cublasLtMatmulDescDestroy, made)
        describe = self._library.cublasLtMatmulDescSetAttribute
        self._set(describe, made, _TRANSPOSE_A, ctypes.c_int(1))
        if self.shape.x_scales:  # sums of a group have fewer bits on the way, those of groups not
            for number, mode in zip(_SCALE_MODES, _MODES[self.shape.x_scales], strict=True):
                self._set(describe, made, number, ctypes.c_int32(mode))
            # Without pointers no algorithm is found; a launch sets its own.
            place = ctypes.c_void_p(_workspace(self.device).data_ptr())
            for number in _SCALE_POINTERS:
                self._set(describe, made, number, place)
        elif self.shape.dtype == torch.float8_e4m3fn:
            self._set(describe, made, _FAST_ACCUMULATION, ctypes.c_int8(1))
        return made

    def set_scales(self, of_weight: int, of_x: int) -> None:
        """Set the addresses of the scales that the next launch reads, of f32, aligned to 16 bytes.

        With L = ceil(inputs / 128): of the weights `[L, outputs]`; of x `[L, rows]`, or of blocks
        `[ceil(rows / 128), L rounded up to 4]`.
        """
        for number, address in zip(_SCALE_POINTERS, (of_weight, of_x), strict=True):
            place = ctypes.c_void_p(address)
            describe = self._library.cublasLtMatmulDescSetAttribute
            self._set(describe, self._description, number, place)

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        status = self._library.cublasLtMatrixLayoutCreate(
            ctypes.byref(made), _DATA_TYPES[dtype], rows, columns, stride
        )
        _check(status, str(self.shape))
        weakref.finalize(self, self._library.cublasLtMatrixLayoutDestroy, made)
        return made

    def _set(self, function: Any, of: ctypes.c_void_p, number: int, value: Any) -> None:
        status = function(of, number, ctypes.byref(value), ctypes.sizeof(value))
        _check(status, f"{self.shape}: attribute {number}")

    def heuristics(self, workspace: int, count: int = 8) -> list[Algorithm]:
        """Return the algorithms that cuBLASLt ranks highest, best first; never more than 8.

        Parts of a sum that is split are added in fp32, in one order.
        """
        lt, preference = self._library, ctypes.c_void_p()
        _check(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), str(self.shape))
        try:
            settings = [
                (_MAX_WORKSPACE, ctypes.c_uint64(workspace)),
                (_REDUCTIONS, ctypes.c_uint32(_REDUCE_IN_FP32)),
                *((number, ctypes.c_uint32(self.shape.alignment)) for number in _ALIGNMENTS),
            ]
            for number, value in settings:
                self._set(lt.cublasLtMatmulPreferenceSetAttribute, preference, number, value)
            results, found = (_Result * count)(), ctypes.c_int()
            status = lt.cublasLtMatmulAlgoGetHeuristic(
                *(self._handle, self._description),
                *(self._weight, self._x, self._out, self._out, preference),
                *(count, results, ctypes.byref(found)),
            )
        finally:
            lt.cublasLtMatmulPreferenceDestroy(preference)
        if status == NOT_SUPPORTED:
            return []
        _check(status, str(self.shape))
        taken = [result for result in results[: found.value] if result.state == 0]
        return [Algorithm(bytes(result.algorithm), result.workspace) for result in taken]

    def algorithm_of(self, blob: bytes) -> Algorithm | None:
        """Return the algorithm if it can compute this shape, however slowly; else None."""
        result, algorithm = _Result(), _Blob.from_buffer_copy(blob)
        status = self._library.cublasLtMatmulAlgoCheck(
            *(self._handle, self._description),
            *(self._weight, self._x, self._out, self._out),
            *(algorithm, ctypes.byref(result)),
        )
        if status != 0 or result.workspace > WORKSPACE:
            return None
        return Algorithm(blob, result.workspace)

    def arguments(self) -> tuple[ctypes.c_void_p, ...]:
        """Handle, description, and the layouts of weight, x and out."""
        return self._handle, self._description, self._weight, self._x, self._out


@functools.cache
def _workspace(device: int) -> torch.Tensor:
    """Return the workspace of a device, shared by all GEMMs: they run one after another."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


class MatmulPlan:
    """A GEMM that is ready to be launched, any number of times."""

    def __init__(self, problem: Problem, algorithm: Algorithm) -> None:
        self.algorithm, self.shape = algorithm, problem.shape
        self._problem = problem  # owns the descriptors
        self._matmul = library().cublasLtMatmul
        self._arguments = problem.arguments()
        self._blob = _Blob.from_buffer_copy(algorithm.blob)
        self._workspace = _workspace(problem.device).data_ptr() if algorithm.workspace else None
        self._blob_address = ctypes.addressof(self._blob)
        numbers = _INTEGERS if problem.shape.dtype == torch.int8 else _FLOATS
        zero, one = (ctypes.addressof(numbers) + offset for offset in (0, 4))
        self._alpha, self._beta = one, one if problem.shape.adds else zero

    def launch_by_groups(
        self, x: int, weight: int, out: int, stream: int, of_weight: int, of_x: int
    ) -> None:
        """`launch`, with the addresses of scales (`Problem.set_scales`)."""
        self._problem.set_scales(of_weight, of_x)
        self._start(x, weight, out, stream)
        if tape.is_noting():

            def again(values: list[int], _: object) -> None:
                x, weight, out, of_weight, of_x = values
                self._problem.set_scales(of_weight, of_x)
                self._start(x, weight, out, stream)

            self._note(again, [x, weight, out, of_weight, of_x])

    def launch(self, x: int, weight: int, out: int, stream: int) -> None:
        """`out = x weight^T`, `+=` if the shape adds; addresses, and the stream's handle."""
        self._start(x, weight, out, stream)
        if tape.is_noting():

            def again(values: list[int], _: object) -> None:
                x, weight, out = values
                self._start(x, weight, out, stream)

            self._note(again, [x, weight, out])

    def _note(self, again: Callable[[list[Any], Any], None], addresses: list[int]) -> None:
        places = [*range(len(addresses))]
        tape.note(tape.Noted(str(self.shape), again, addresses, places, {}))

    def _start(self, x: int, weight: int, out: int, stream: int) -> None:
        handle, description, weight_layout, x_layout, out_layout = self._arguments
        status = self._matmul(
            handle,
            description,
            self._alpha,
            weight,
            weight_layout,
            x,
            x_layout,
            self._beta,
            out,
            out_layout,
            out,
            out_layout,
            self._blob_address,
            self._workspace,
            self.algorithm.workspace,
            stream,
        )
        if status != 0:
            _check(status, str(self.shape))
