"""Tensor maps: how Hopper's copy engine cuts boxes out of a matrix in memory."""

import ctypes
import functools

import torch
from torch import Tensor

from slipstream.kernels import jit

COLUMN_BYTES = 128  # of a box's row: as wide as the swizzle


def boxes(
    x: Tensor, num_rows: int, num_columns: int, box_rows: int, row_stride: int = 0
) -> jit.TensorMap:
    """The map of 16-bit `x` as `[num_rows, num_columns]`, by boxes of `box_rows` rows.

    Rows are contiguous, and so are their elements, unless `row_stride` (in elements) is given.

    A box is 128 bytes wide and arrives in shared memory with SWIZZLE_128B (wgmma.cuh says how that
    lies). `KernelError` where the driver refuses.
    """
    stride = (row_stride or num_columns) * x.itemsize
    return _encode(x.data_ptr(), x.dtype, num_rows, num_columns, stride, box_rows)


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int, dtype: torch.dtype, num_rows: int, num_columns: int, stride: int, box_rows: int
) -> jit.TensorMap:
    from cuda.bindings import driver

    kinds = {
        torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }
    status, encoded = driver.cuTensorMapEncodeTiled(
        kinds[dtype],
        2,
        address,
        [driver.cuuint64_t(size) for size in (num_columns, num_rows)],
        [driver.cuuint64_t(stride)],
        [driver.cuuint32_t(size) for size in (COLUMN_BYTES // dtype.itemsize, box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    jit.require(int(status) == 0, f"tensor map of {num_rows} x {num_columns}: CUDA error {status}")
    size, alignment = 128, 64
    memory = ctypes.create_string_buffer(size + alignment)
    target = -(-ctypes.addressof(memory) // alignment) * alignment
    ctypes.memmove(target, int(encoded.getPtr()), size)
    return jit.TensorMap(target, memory)
