"""The fastest of cuBLASLt's kernels for a GEMM: measured once a machine, kept on disk.

A file holds what was measured on one kind of machine: GPU, driver and version of cuBLASLt, whose
hash is in its name. A file that cannot be read counts as absent: its GEMMs then run by the default.
What cannot be written is kept in the memory of the process.
"""

import bisect
import functools
import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import torch
from slipstream_runtime.claims import Claims
from slipstream_runtime.once import warn_once

from slipstream.kernels.gemm import cublaslt_api
from slipstream.kernels.gemm.cublaslt_api import GemmShape
from slipstream.kernels.runtime import disk_cache

_FORMAT = 2  # of the file, and of what an algorithm is written as
_BLOB_SIZE = 64
_PATIENCE_S = 30.0  # while another process writes the file
_BRIEF_S = 0.1  # the same in idle times, when a request may come
_log = logging.getLogger(__name__)
_unsaved: dict["Machine", list["Choice"]] = {}  # the newest last


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that decides which kernel is the fastest, and whether it exists."""

    gpu: str
    num_sms: int
    driver: int  # 13000: the driver of CUDA 13.0
    cublaslt: int  # 130100: 13.1

    @staticmethod
    def of(device: int) -> "Machine":
        """The machine that we run on."""
        from cuda.bindings import driver

        properties = torch.cuda.get_device_properties(device)
        return Machine(
            gpu=properties.name,
            num_sms=properties.multi_processor_count,
            driver=int(driver.cuDriverGetVersion()[1]),
            cublaslt=cublaslt_api.version(),
        )


class Product(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix of weights, and how it is multiplied; the rows are left open."""

    inputs: int
    outputs: int
    dtype: str
    out_dtype: str
    adds: bool  # to what is there
    x_scales: str = ""  # of a GEMM by groups: how x is scaled

    @staticmethod
    def of(shape: GemmShape) -> "Product":
        """The product of a shape."""
        dtype, out_dtype = (
            str(dtype).removeprefix("torch.") for dtype in (shape.dtype, shape.out_dtype)
        )
        sizes = (shape.inputs, shape.outputs)
        return Product(*sizes, dtype, out_dtype, shape.adds, shape.x_scales)


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest kernel that was found for so many rows."""

    product: Product
    rows: int
    algorithm: str  # `cublaslt_api.Algorithm.blob` in hexadecimal digits
    kernel: str  # the same for people
    microseconds: float
    default_microseconds: float

    @property
    def blob(self) -> bytes:
        """The algorithm; ValueError if it is none."""
        blob = bytes.fromhex(self.algorithm)
        if len(blob) != _BLOB_SIZE:
            raise ValueError(f"an algorithm of {len(blob)} bytes, not {_BLOB_SIZE}")
        return blob


def reach(rows: int) -> int:
    """Return the most rows whose choice is taken for fewer: for so many."""
    return rows + max(16, rows // 8)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    machine: Machine
    choices: list[Choice]


class Choices:
    """Choices by product and rows."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._blobs: dict[Product, dict[int, bytes]] = defaultdict(dict)
        for choice in choices:
            self._blobs[choice.product][choice.rows] = choice.blob
        self._rows = {product: sorted(blobs) for product, blobs in self._blobs.items()}

    def find(self, product: Product, rows: int) -> bytes | None:
        """Return the algorithm measured for so many rows, or for a few more; else None."""
        measured = self._rows.get(product, [])
        index = bisect.bisect_left(measured, rows)
        if index == len(measured) or measured[index] > reach(rows):
            return None
        return self._blobs[product][measured[index]]


@functools.cache
def choices(device: int) -> Choices:
    """Return the choices measured on this machine, read once a process."""
    found = load(Machine.of(device))
    if found:
        _log.info("%d GEMMs run by the kernels that were measured as the fastest", len(found))
    else:
        _log.info("GEMMs run by cuBLASLt's guesses: `slipstream tune` measures its kernels")
    return Choices(found)


def path(machine: Machine) -> Path:
    """The file of a machine."""
    key = msgspec.json.encode([_FORMAT, machine])
    name = re.sub(r"[^a-z0-9]+", "-", machine.gpu.lower()).strip("-")
    return disk_cache.folder("tuning") / f"{name}-{hashlib.sha256(key).hexdigest()[:16]}.json"


def load(machine: Machine) -> list[Choice]:
    """Return the choices for a machine: of its file, or newer ones that could not be written."""
    return _merged([*_read(machine), *_unsaved.get(machine, [])])


def _merged(choices: Iterable[Choice]) -> list[Choice]:
    """Return the last for each product and number of rows."""
    return list({(choice.product, choice.rows): choice for choice in choices}.values())


def _read(machine: Machine) -> list[Choice]:
    """Read the machine's file; log a warning and return nothing if it cannot be used."""
    file = path(machine)
    try:
        read = msgspec.json.decode(file.read_bytes(), type=_File)
        for choice in read.choices:
            _ = choice.blob
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        warn_once(_log, f"{file} is ignored: {error}")
        return []
    if (read.format, read.machine) != (_FORMAT, machine):
        warn_once(_log, f"{file} is ignored: it is of another machine")
        return []
    return read.choices


def save(machine: Machine, measured: Sequence[Choice], patience_s: float = _PATIENCE_S) -> None:
    """Add to the machine's file, in place of what was measured for the same product and rows.

    What other processes add meanwhile stays.
    Raises OSError; TimeoutError, which is one, if another process has been writing the file for
    `patience_s`.
    """
    file = path(machine)
    disk_cache.check_writable(file.parent)
    with closing(Claims(file)) as claims, claims.writing(patience_s):
        data = msgspec.json.encode(_File(_FORMAT, machine, _merged([*_read(machine), *measured])))
        disk_cache.write_whole(file, msgspec.json.format(data, indent=1) + b"\n")


def keep(machine: Machine, measured: Sequence[Choice]) -> OSError | None:
    """Save what was measured, and what could not be saved before; return why it is not on disk.

    None: it is. TimeoutError: another process writes the file, so a later call may save it.
    Where it cannot be written it is kept in memory, which the first of such calls logs.
    """
    if not measured and machine not in _unsaved:
        return None
    try:
        # A process that is stopped while it writes is waited for once.
        patience_s = 0.0 if machine in _unsaved else _BRIEF_S
        save(machine, [*_unsaved.get(machine, []), *measured], patience_s)
    except OSError as error:
        _keep_in_memory(machine, measured, error)
        return error
    if _unsaved.pop(machine, None) is not None:
        _log.info("%s: what was kept in memory is written", path(machine))
    return None


def claims_of(machine: Machine) -> Claims:
    """Return claims on GEMMs; all are ours where no other process would see their choices."""
    try:
        disk_cache.check_writable(path(machine).parent)
    except OSError as error:
        _keep_in_memory(machine, [], error)
        return Claims(None)
    return Claims(path(machine))


def _keep_in_memory(machine: Machine, measured: Sequence[Choice], error: OSError) -> None:
    if machine not in _unsaved:
        _log.warning(
            "%s cannot be written, what is measured is kept in memory only: %s",
            *(path(machine).parent, error),
        )
    _unsaved[machine] = _merged([*_unsaved.get(machine, []), *measured])
