"""A kernel that is loaded, and how its arguments pass to the driver."""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A `CUtensorMap` (128 bytes, aligned to 64) as a kernel's `__grid_constant__` parameter."""

    address: int  # on the host; read at the launch
    owner: object  # keeps it alive
    of: int = 0  # the address of the matrix on the device
    moved: Callable[[int], "TensorMap"] | None = None  # the same of one at another address


class Kernel:
    """A loaded function, and the memory through which the arguments of each launch pass.

    Not for several threads at once; the driver has read the arguments when a launch returns.
    """

    def __init__(self, function: Any, layout: str, block: int, shared_memory: int) -> None:
        from cuda.bindings import driver

        self._launch = driver.cuLaunchKernelEx
        self._function = function  # keeps the module loaded
        self._handle = driver.CUfunction(function.kernel.ptr)
        self._values = struct.Struct(layout)
        self._memory = ctypes.create_string_buffer(self._values.size)
        begin = ctypes.addressof(self._memory)
        places = range(begin, begin + self._values.size, 8)
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        self._arguments = ctypes.addressof(self._pointers)
        self._config = driver.CUlaunchConfig()
        self._config.blockDimX = block
        self._config.blockDimY = self._config.blockDimZ = 1
        self._config.sharedMemBytes = shared_memory

    def overlap(self) -> None:
        """Launches may start while the kernel before them in the stream still runs."""
        from cuda.bindings import driver

        attribute = driver.CUlaunchAttribute()
        programmatic = driver.CUlaunchAttributeID
        attribute.id = programmatic.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._config.attrs = [attribute]
        self._config.numAttrs = 1

    def __call__(
        self,
        grid: tuple[int, ...],
        stream: Any,
        values: list[int | float],
        maps: dict[int, TensorMap],
    ) -> int:
        """The driver's status. `maps` are passed by address in place of `values` there."""
        self._values.pack_into(self._memory, 0, *values)
        for index, tensor_map in maps.items():
            self._pointers[index] = tensor_map.address
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.hStream = stream
        (status,) = self._launch(config, self._handle, self._arguments, 0)
        return int(status)
