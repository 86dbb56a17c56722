"""Tensor maps: how Hopper's copy engine cuts boxes out of a matrix in memory."""

import ctypes
import functools

import torch
from torch import Tensor

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.kernel import TensorMap

COLUMN_BYTES = 128  # of a box's row: as wide as the swizzle
_WORD = 8  # bytes of an element of `words`


def boxes(
    x: Tensor, num_rows: int, num_columns: int, box_rows: int, row_stride: int = 0
) -> TensorMap:
    """The map of `x` as `[num_rows, num_columns]`, by boxes of `box_rows` rows.

    It is of fp16, bf16 or 8 bits. Rows are contiguous, and so are their elements, unless
    `row_stride` (in elements) is given.

    A box is 128 bytes wide and arrives in shared memory with SWIZZLE_128B (wgmma.cuh says how that
    lies). `KernelError` where the driver refuses.
    """
    stride = (row_stride or num_columns) * x.itemsize
    sizes, box = (num_columns, num_rows), (COLUMN_BYTES // x.itemsize, box_rows)
    return _encode(x.data_ptr(), x.dtype, sizes, (stride,), box)


def eights(x: Tensor, box_columns: int, box_rows: int) -> TensorMap:
    """The map of contiguous `x [n, k]` (fp16, bf16 or of 8 bits) by boxes of columns of 128 bytes.

    Rows come in eights, which lie in shared memory one after the other, each by columns, as if the
    box had 8 rows; so they are also read: what is next to each other in memory, shortly after each
    other. `n`, and `box_rows`, are multiples of 8, `k` of a column.
    """
    num_rows, width = x.shape
    column = COLUMN_BYTES // x.itemsize
    sizes = (column, 8, width // column, num_rows // 8)
    row_bytes = width * x.itemsize
    strides = (row_bytes, COLUMN_BYTES, 8 * row_bytes)
    return _encode(x.data_ptr(), x.dtype, sizes, strides, (column, 8, box_columns, box_rows // 8))


def expert_rows(x: Tensor, streams: int, box_rows: int) -> TensorMap:
    """The map of contiguous `x [e, streams * n, k]` (fp16, bf16, e4m3) by boxes of one matrix.

    A box has a column of 128 bytes of `box_rows` rows of each stream: eight of the first, the same
    eight of the second, and so on. `n` and `box_rows` are multiples of 8; rows behind `n` are zero.
    """
    count, rows, width = x.shape
    eights = rows // streams // 8
    row_bytes = width * x.itemsize
    sizes = (width, 8, streams, eights, count)
    strides = (row_bytes, 8 * eights * row_bytes, 8 * row_bytes, rows * row_bytes)
    box = (COLUMN_BYTES // x.itemsize, 8, streams, box_rows // 8, 1)
    return _encode(x.data_ptr(), x.dtype, sizes, strides, box)


def words(x: Tensor, num_rows: int, row_bytes: int, box_bytes: int, box_rows: int) -> TensorMap:
    """The map of contiguous bytes as `[num_rows, row_bytes]`, by boxes that arrive row by row.

    Both sizes of bytes are multiples of 8, that of a row of 16. A kernel counts columns in eights.
    """
    sizes, box = (row_bytes // _WORD, num_rows), (box_bytes // _WORD, box_rows)
    return _encode(x.data_ptr(), torch.int64, sizes, (row_bytes,), box)


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> TensorMap:
    """Sizes and the box in elements, the innermost first; strides of all but that in bytes.

    Words are not swizzled.
    """
    from cuda.bindings import driver

    kinds = {
        torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float8_e4m3fn: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.int8: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.int64: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT64,
    }
    swizzles = driver.CUtensorMapSwizzle
    status, encoded = driver.cuTensorMapEncodeTiled(
        kinds[dtype],
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
        if dtype == torch.int64
        else swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        # Wider reads, of 256 bytes, make a stream of weights 2 to 4 % slower.
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    jit.require(int(status) == 0, f"tensor map of {sizes} by {box}: CUDA error {status}")
    size, alignment = 128, 64
    memory = ctypes.create_string_buffer(size + alignment)
    target = -(-ctypes.addressof(memory) // alignment) * alignment
    ctypes.memmove(target, int(encoded.getPtr()), size)

    def moved(to: int) -> TensorMap:
        return _encode(to, dtype, sizes, strides, box)

    return TensorMap(target, memory, address, moved)
