"""A second NVRTC in one process: that of CUDA 12 where `cuda.bindings` has CUDA 13's, or reversed.

`jit.compile_variant` runs unchanged over it: set `cuda.bindings.nvrtc` to `Nvrtc(find_other())`.
"""

import ctypes
import importlib.util
from pathlib import Path

from cuda.bindings import nvrtc

OTHER = {12: 13, 13: 12}


def find_other() -> Path | None:
    """Return the NVRTC library of the CUDA that the bindings are not for; None: not installed."""
    major = OTHER[nvrtc.nvrtcVersion()[1]]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found in Path(folder).glob(f"*/lib/libnvrtc.so.{major}"):
            return found
    return None


class Nvrtc:
    """The functions of `cuda.bindings.nvrtc` that `jit` uses, over one library: (status, value)."""

    def __init__(self, library: Path) -> None:
        nvrtc.nvrtcVersion()  # loads its own, unless one of any version is there already
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):  # sought by its bare name
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(library))

    def nvrtcVersion(self) -> tuple[int, int, int]:  # noqa: N802
        """Return the status, and the version's two numbers."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        status = self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return status, major.value, minor.value

    def nvrtcCreateProgram(  # noqa: N802
        self, source: bytes, name: bytes, count: int, headers: list[bytes], names: list[bytes]
    ) -> tuple[int, ctypes.c_void_p]:
        """Return the status, and a program."""
        program = ctypes.c_void_p()
        status = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source, name, count, _strings(headers), _strings(names)
        )
        return status, program

    def nvrtcCompileProgram(  # noqa: N802
        self, program: ctypes.c_void_p, count: int, options: list[bytes]
    ) -> tuple[int]:
        """Return the status; the log says why it is not 0."""
        return (self._library.nvrtcCompileProgram(program, count, _strings(options)),)

    def nvrtcDestroyProgram(self, program: ctypes.c_void_p) -> tuple[int]:  # noqa: N802
        """Return the status."""
        return (self._library.nvrtcDestroyProgram(ctypes.byref(program)),)

    def nvrtcGetProgramLogSize(self, program: ctypes.c_void_p) -> tuple[int, int]:  # noqa: N802
        """Return the status, and the log's bytes."""
        return self._size("nvrtcGetProgramLogSize", program)

    def nvrtcGetCUBINSize(self, program: ctypes.c_void_p) -> tuple[int, int]:  # noqa: N802
        """Return the status, and the cubin's bytes."""
        return self._size("nvrtcGetCUBINSize", program)

    def nvrtcGetProgramLog(self, program: ctypes.c_void_p, log: bytearray) -> tuple[int]:  # noqa: N802
        """Fill `log`; return the status."""
        return self._fill("nvrtcGetProgramLog", program, log)

    def nvrtcGetCUBIN(self, program: ctypes.c_void_p, cubin: bytearray) -> tuple[int]:  # noqa: N802
        """Fill `cubin`; return the status."""
        return self._fill("nvrtcGetCUBIN", program, cubin)

    def _size(self, function: str, program: ctypes.c_void_p) -> tuple[int, int]:
        size = ctypes.c_size_t()
        status = getattr(self._library, function)(program, ctypes.byref(size))
        return status, size.value

    def _fill(self, function: str, program: ctypes.c_void_p, buffer: bytearray) -> tuple[int]:
        place = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        return (getattr(self._library, function)(program, place),)


def _strings(values: list[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)
