"""CUDA source to running kernels: NVRTC, a cache on disk, a CuPy module, torch's stream.

A `Variant` names a .cu file and the -D macros that make one instantiation of it. Compiling needs no
GPU (`compile_variant`); only `launch` imports CuPy. Kernels include no headers but ours, by
`#include "name"`.
"""

import functools
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.runtime import disk_cache, tape
from slipstream.kernels.runtime.kernel import Kernel, TensorMap
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import architecture_of

DTYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
HEAD_SIZES = (64, 80, 96, 128, 256)
MIN_CAPABILITY = (8, 0)  # cp.async, bf16 mma

FOLDER = Path(__file__).parents[1]  # names of sources and headers are relative to it
_ARCHITECTURE = re.compile(r"/sm(\d+)/")  # in the name of a source that is for one alone
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_log = logging.getLogger(__name__)

Argument = Tensor | int | float | TensorMap | None  # of a launch


@dataclass(frozen=True, slots=True)
class Variant:
    """An instantiation of a .cu file; equal variants are compiled once."""

    source: str
    defines: tuple[tuple[str, str], ...]
    only: str = ""  # the one architecture that has its instructions, "sm_90a" say; all if empty
    _hash: int = field(init=False, repr=False, compare=False)  # once: every launch asks for it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.source, self.defines, self.only)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.defines)])


@functools.cache
def variant(
    source: str, dtype: torch.dtype | None = None, only: str = "", **defines: int | str
) -> Variant:
    """Name the variant of `source` with `-D ELEMENT=` the CUDA name of `dtype`, and `defines`.

    Sources in a folder of an architecture are for that alone.
    """
    if not only and (number := _ARCHITECTURE.search(source)):
        only = architecture_of(divmod(int(number[1]), 10))
    pairs = [] if dtype is None else [("ELEMENT", type_name(dtype))]
    values = ((name, str(value)) for name, value in defines.items())
    return Variant(source, (*pairs, *values), only)


def type_name(dtype: torch.dtype) -> str:
    """The CUDA type of a tensor's elements; `KernelError` if no kernel is built for it."""
    if dtype not in DTYPES:
        raise KernelError(
            f"dtype {dtype} has no kernels; they are built for float32, float16, bfloat16"
        )
    return DTYPES[dtype]


def head_size_of(dtype: torch.dtype, head_size: int) -> int:
    """`head_size`, or `KernelError` where no kernel is built for it."""
    type_name(dtype)
    if head_size not in HEAD_SIZES:
        raise KernelError(f"head size {head_size} has no kernels; they are built for {HEAD_SIZES}")
    return head_size


def has_large_heads(head_size: int) -> bool:
    """Whether heads are so large (registers, shared memory) that attention kernels have shapes of
    their own for them.
    """
    return head_size > 128


def block_shift(block_size: int) -> int:
    """log2 of the cache's block size; `KernelError` unless a power of two from 8 to 256."""
    if block_size not in (8, 16, 32, 64, 128, 256):
        raise KernelError(f"block size {block_size} is not a power of two from 8 to 256")
    return block_size.bit_length() - 1


def vector_width(width: int, *tensors: Tensor) -> int:
    """Elements of the widest access (16 bytes, or one) to which every row is aligned."""
    wide = 16 // tensors[0].element_size()
    is_aligned = width % wide == 0 and all(
        t.data_ptr() % 16 == 0 and all(stride % wide == 0 for stride in t.stride()[:-1])
        for t in tensors
    )
    return wide if is_aligned else 1


def require(condition: bool, message: str, *values: object) -> None:
    """Raise `KernelError` unless `condition`.

    `values` go to where `message` has `{}`: the message is formatted only
    where it is raised.
    """
    if not condition:
        raise KernelError(message.format(*values) if values else message)


# ---- compiling ----


def options(arch: str) -> tuple[str, ...]:
    """NVRTC's options for every kernel; ptxas reports registers and spills in the log."""
    return (f"-arch={arch}", "-std=c++17", "-lineinfo", "--ptxas-options=-v")


def compile_variant(wanted: Variant, arch: str) -> tuple[bytes, str]:
    """The cubin of a variant for `sm_XX` and the compiler's log, or a `KernelError` with it."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise KernelError(f"{wanted} for {arch}: {result[0]!s}")
        return result[1] if len(result) > 1 else None

    headers = _headers(wanted.source)
    program = check(
        nvrtc.nvrtcCreateProgram(
            (FOLDER / wanted.source).read_bytes(),
            wanted.source.encode(),
            len(headers),
            list(headers.values()),
            [name.encode() for name in headers],
        )
    )
    try:
        flags = [*options(arch), *(f"-D{name}={value}" for name, value in wanted.defines)]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0 \n").decode()
        if int(status[0]) != 0:
            raise KernelError(f"{wanted} for {arch} does not compile:\n{text}")
        cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_key(wanted: Variant, arch: str) -> str:
    """Hash all that decides the cubin: the source, the headers that it includes, macros, options,
    compiler version.
    """
    from cuda.bindings import nvrtc

    digest = hashlib.sha256()
    parts = [
        (FOLDER / wanted.source).read_bytes(),
        *(part for item in _headers(wanted.source).items() for part in (item[0].encode(), item[1])),
        str(wanted).encode(),
        repr(options(arch)).encode(),
        repr(nvrtc.nvrtcVersion()).encode(),
    ]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


def _headers(source: str) -> dict[str, bytes]:
    """Return each header that `source` includes, directly or through another: name to bytes.

    Includes in an untaken `#if` count too. The compiler is given these headers and no others, so no
    byte that decides a cubin is missing from its cache key.
    """
    found: dict[str, bytes] = {}
    pending = [source]
    while pending:
        for match in _INCLUDE.findall((FOLDER / pending.pop()).read_bytes()):
            name = match.decode()
            if name not in found:
                found[name] = (FOLDER / name).read_bytes()
                pending.append(name)
    return dict(sorted(found.items()))


def cubin_path(wanted: Variant, arch: str, folder: Path | None = None) -> Path:
    """The compiled file of a variant in the cache on disk, made now unless it is there."""
    folder = folder or disk_cache.folder("kernels")
    path = folder / f"{Path(wanted.source).stem}-{arch}-{cache_key(wanted, arch)}.cubin"
    if path.exists():
        return path
    cubin, log = compile_variant(wanted, arch)
    _log.debug("compiled %s for %s: %s", wanted, arch, log)
    try:
        disk_cache.write_whole(path, cubin)
    except OSError as error:  # a read-only home: compile for this process alone
        _log.warning("no kernel cache at %s (%s)", folder, error)
        path = Path(tempfile.mkdtemp(prefix="slipstream-")) / path.name
        disk_cache.write_whole(path, cubin)
    return path


_cubin = functools.cache(cubin_path)  # compiled once, even where no cache can be written
_put_off: set[Variant] | None = None  # what `compile_ahead` collects


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Launch nothing in this block; at its end compile what it would have launched, side by side.

    A step that runs in it meets all its kernels, and its outputs stay as they were allocated.
    """
    global _put_off
    wanted: set[Variant] = set()
    _put_off = wanted
    try:
        yield
    finally:
        _put_off = None
    arch = _architecture(torch.cuda.current_device())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as pool:
        list(pool.map(lambda one: _cubin(one, arch), wanted))


def compile_too(variants: Iterable[Variant]) -> None:
    """Within `compile_ahead`, compile these too, which a step of another size would launch."""
    if _put_off is not None:
        _put_off.update(variants)


# ---- launching ----


@functools.cache
def _architecture(device: int) -> str:
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    require(
        capability >= MIN_CAPABILITY,
        f"{name} has compute capability {capability}; the kernels need {MIN_CAPABILITY} or newer",
    )
    return architecture_of(capability)


@functools.cache
def shared_memory_limit(device: int) -> int:
    """Bytes of shared memory that one CTA may have on the device."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))


@functools.cache
def num_multiprocessors(device: int) -> int:
    """Count the multiprocessors of the device of this index."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device has the instructions of sm_90a."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _module(wanted: Variant, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.RawModule(path=str(_cubin(wanted, _architecture(device))))


@functools.cache
def _kernel(
    wanted: Variant,
    entry: str,
    block: int,
    shared_memory: int,
    overlaps: bool,
    device: int,
    layout: str,
) -> Kernel:
    import cupy

    with cupy.cuda.Device(device):
        function = _module(wanted, device).get_function(entry)
        if shared_memory > 48 * 1024:
            # The bound is the function's, not a launch's: raised once, to all there is.
            static = function.shared_size_bytes
            function.max_dynamic_shared_size_bytes = shared_memory_limit(device) - static
        kernel = Kernel(function, layout, block, shared_memory)
    if overlaps and torch.cuda.get_device_capability(device) >= (9, 0):
        kernel.overlap()
    return kernel


@functools.cache
def _stream(handle: int) -> Any:
    from cuda.bindings import driver

    return driver.CUstream(handle)


@functools.cache
def _passed(types: tuple[type, ...]) -> tuple[str, list[int], list[int], list[int]]:
    """Return how to pass arguments of these types, 8 bytes each; places of tensors, maps, None."""
    kinds = {Tensor: "P", TensorMap: "P", NoneType: "P", int: "q", float: "f4x"}
    layout = "".join(next(kinds[k] for k in kinds if issubclass(one, k)) for one in types)
    tensors_at, maps_at, nones_at = (
        [i for i, one in enumerate(types) if issubclass(one, kind)]
        for kind in (Tensor, TensorMap, NoneType)
    )
    return layout, tensors_at, maps_at, nones_at


def launch(
    wanted: Variant,
    entry: str,
    grid: tuple[int, ...],
    block: int,
    *args: Argument,
    shared_memory: int = 0,
    overlaps: bool = False,
) -> None:
    """Start a kernel on torch's current stream.

    Tensors pass as pointers, None as a null pointer, ints as `i64`, floats as `float`;
    `shared_memory` is in bytes. A kernel that `overlaps` starts while the one before it ends
    (programmatic dependent launch, from sm_90 on): whatever it reads or writes of others, it does
    after `wait_for_previous()`.
    """
    if _put_off is not None:
        _put_off.add(wanted)
        return
    device = torch.cuda.current_device()
    layout, tensors_at, maps_at, nones_at = _passed(tuple(map(type, args)))
    values: list[Any] = list(args)
    for index in tensors_at:
        tensor = values[index]
        if tensor.get_device() != device:
            raise KernelError(f"{entry}: tensor on {tensor.device}, not cuda:{device}")
        values[index] = tensor.data_ptr()
    maps = {index: values[index] for index in maps_at}
    for index in (*maps_at, *nones_at):
        values[index] = 0
    kernel = _kernel(wanted, entry, block, shared_memory, overlaps, device, layout)
    stream = _stream(torch._C._cuda_getCurrentRawStream(device))
    status = kernel(grid, stream, values, maps)
    if status != 0:
        raise KernelError(
            f"{entry}, grid {grid}, {shared_memory} bytes shared: CUDA error {status}"
        )
    if tape.is_noting():
        again = functools.partial(kernel, grid, stream)
        tape.note(tape.Noted(entry, again, values, tensors_at, maps))


def bind(
    wanted: Variant, entry: str, block: int, num_args: int, stream: torch.cuda.Stream
) -> Callable[..., None]:
    """A kernel of so many pointers and integers in one stream: `run(num_ctas, *args)`.

    A launch looks nothing up, which would be slow on a host that was idle. The kernel is loaded at
    once, and its launches are not put off.
    """
    kernel = _kernel(wanted, entry, block, 0, False, stream.device_index, "q" * num_args)
    handle = _stream(stream.cuda_stream)

    def run(num_ctas: int, *args: int) -> None:
        status = kernel((num_ctas,), handle, list(args), {})
        if status != 0:
            raise KernelError(f"{entry}, {num_ctas} CTAs: CUDA error {status}")

    return run
