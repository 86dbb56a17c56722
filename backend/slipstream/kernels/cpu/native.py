"""The library of the processor's kernels, loaded; `abi.h` has its structures.

`SLIPSTREAM_CPU_ISA` names the instruction set, one of `FORMS` that the processor has, in the place
of the best; `none` leaves all to torch. `SLIPSTREAM_CPU_ROWS` = 8 has rows rounded to 8 bits beside
weights of 4 bits, in the place of 16. `SLIPSTREAM_CPU_FLAGS` are more flags of the compiler, for a
library of its own: `make sanitize-cpu` has sanitizers by it.
"""

import ctypes
import functools
import logging
import os
import shlex
import time
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.build import BuildError, built, compiler, path_of

_log = logging.getLogger(__name__)
VARIABLE = "SLIPSTREAM_CPU_ISA"
ROWS = "SLIPSTREAM_CPU_ROWS"
FLAGS = "SLIPSTREAM_CPU_FLAGS"
FORMS = ("avx2", "avx512", "vnni", "amx")  # in the order of `enum Form`, from 1 on


class Weights(ctypes.Structure):
    """`struct Weights`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minimums", c_void_p),
        ("bits", c_int32),
        ("group", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("halves", c_int32),
        ("zero", c_float),
        ("row_bits", c_int32),
        ("by_row", c_int32),
        ("floats", c_int32),
        ("unused", c_int32),
    )


class Product(ctypes.Structure):
    """`struct Product`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("weights", Weights),
        ("norm", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("norm_offset", c_float),
        ("gate", c_int32),
        ("unused", c_int32),
    )


class Experts(ctypes.Structure):
    """`struct Experts`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("first", Product),
        ("codes", c_int64),
        ("scales", c_int64),
        ("minimums", c_int64),
        ("order", c_void_p),
        ("offsets", c_void_p),
        ("weights", c_void_p),
        ("count", c_int32),
        ("top_k", c_int32),
        ("added", c_void_p),
        ("marks", c_void_p),
    )


class Sum(ctypes.Structure):
    """`struct Sum`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("terms", c_void_p),
        ("shared", c_void_p),
        ("gates", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("gate_stride", c_int64),
        ("n", c_int64),
        ("width", c_int64),
        ("top_k", c_int32),
        ("unused", c_int32),
    )


class Places(ctypes.Structure):
    """`struct Places`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("chosen", c_void_p),
        ("order", c_void_p),
        ("offsets", c_void_p),
        ("tiles", c_void_p),
        ("pairs", c_int64),
        ("experts", c_int64),
        ("tile_rows", c_int32),
        ("unused", c_int32),
    )


class Cache(ctypes.Structure):
    """`struct Cache`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("data", c_void_p),
        ("format", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_size", c_int32),
    )


class Rotation(ctypes.Structure):
    """`struct Rotation`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("cos_sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("factors", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("eps", c_float),
        ("are_late", c_int32),
    )


class Sequences(ctypes.Structure):
    """`struct Sequences`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("sinks", c_void_p),
        ("count", c_int32),
        ("num_decodes", c_int32),
        ("window", c_int32),
        ("scale", c_float),
    )


class Step(ctypes.Structure):
    """`struct Step`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        ("count", c_int32),
        ("num_decodes", c_int32),
        ("window", c_int32),
        ("unused", c_int32),
    )


class Choice(ctypes.Structure):
    """`struct Choice`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("correction", c_void_p),
        ("experts", c_int32),
        ("top_k", c_int32),
        ("score", c_int32),
        ("normalises", c_int32),
        ("factor", c_float),
        ("unused", c_int32),
    )


class Mixture(ctypes.Structure):
    """`struct Mixture`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("router", Product),
        ("gate_up", Experts),
        ("down", Experts),
        ("choice", Choice),
    )


class Layer(ctypes.Structure):
    """`struct Layer`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("qkv", Product),
        ("out", Product),
        ("gate_up", Product),
        ("down", Product),
        ("rotation", Rotation),
        ("cache", Cache),
        ("step", c_void_p),
        ("mixture", POINTER(Mixture)),
        ("sinks", c_void_p),
        ("heads", c_int32),
        ("scale", c_float),
    )


class Sampling(ctypes.Structure):
    """`struct Sampling`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab", c_int64),
        ("count", c_int64),
        ("rows", c_void_p),
        ("where", c_void_p),
        ("edits", c_void_p),
        ("counts", c_void_p),
        ("token_ids", c_void_p),
        ("log_probs", c_void_p),
        ("outcomes", c_void_p),
        ("record", c_int64),
    )


class Terms(ctypes.Structure):
    """`struct Terms`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("groups", c_void_p),
        ("rows", c_void_p),
        ("partial", c_void_p),
        ("num_groups", c_int64),
        ("place", c_int64),
        ("width", c_int64),
    )


class Start(ctypes.Structure):
    """`struct Start`."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = (
        ("header", c_void_p),
        ("staged", c_void_p),
        ("sources", c_void_p),
        ("token_ids", c_void_p),
        ("sampled", c_void_p),
        ("tables", c_void_p),
        ("num_tokens", c_int64),
        ("table_stride", c_int64),
    )


class Library:
    """The functions of a library that is loaded.

    Args:
        path: of the library.
        form: one of `FORMS`, which the processor must have; None: its best.
    """

    def __init__(self, path: Path, form: str | None = None) -> None:
        library = ctypes.CDLL(str(path))
        best: int = library.slipstream_best_form()
        self.best = FORMS[best - 1] if best else None
        if self.best is None:
            raise BuildError("the processor has no AVX2 and FMA")
        self._choose = library.slipstream_choose
        self.choose(form or self.best)
        floats, numbers = c_void_p, c_int64
        self.product = library.slipstream_product
        self.product.restype = None
        self.product.argtypes = (
            *(POINTER(Product), floats, numbers, numbers, floats, numbers),
            *(c_int, c_int),
        )
        self.rotate = library.slipstream_rotate
        self.rotate.restype = None
        self.rotate.argtypes = (
            *(POINTER(Rotation), POINTER(Cache), floats, floats, floats),
            *(numbers, numbers, c_int, c_int),
        )
        self.attend = library.slipstream_attend
        self.attend.restype = None
        self.attend.argtypes = (
            *(POINTER(Sequences), POINTER(Cache), floats, numbers, numbers),
            *(c_int, floats, c_int),
        )
        self.blocks = library.slipstream_blocks
        self.blocks.restype = None
        self.blocks.argtypes = (POINTER(Layer), c_int, floats, numbers, floats, c_int)

        self.sample = library.slipstream_sample
        self.sample.restype, self.sample.argtypes = None, (POINTER(Sampling), c_int)
        self.shrink, self.expand = library.slipstream_shrink, library.slipstream_expand
        self.shrink.restype = self.expand.restype = None
        self.shrink.argtypes = (POINTER(Terms), POINTER(Product), floats, numbers, c_int)
        self.expand.argtypes = (POINTER(Terms), POINTER(c_int64), floats, numbers, c_int)
        self.experts, self.combine = library.slipstream_experts, library.slipstream_combine
        self.experts.restype = self.combine.restype = None
        self.experts.argtypes = (POINTER(Experts), floats, numbers, floats, numbers, c_int)
        self.combine.argtypes = (POINTER(Sum), c_int)
        self.place = library.slipstream_place
        self.place.restype, self.place.argtypes = None, (POINTER(Places),)
        self.choose_experts = library.slipstream_choose_experts
        self.choose_experts.restype = None
        self.choose_experts.argtypes = (
            *(POINTER(Choice), floats, numbers, numbers, c_void_p, c_void_p),
        )
        self.start = library.slipstream_start
        self.start.restype, self.start.argtypes = None, (POINTER(Start),)

    def choose(self, form: str) -> None:
        """Have kernels run in one of `FORMS` from now on; raises ConfigError."""
        if self._choose(FORMS.index(form) + 1):
            raise ConfigError(f"{VARIABLE} = {form!r}: the best of this processor is {self.best}")
        self.form = form


@functools.cache
def row_bits() -> int:
    """Return the bits of rows beside weights of 4 bits; raises ConfigError."""
    asked = os.environ.get(ROWS) or "16"
    if asked not in ("8", "16"):
        raise ConfigError(f"{ROWS} = {asked!r} is not 8 or 16")
    return int(asked)


@functools.cache
def library() -> Library | None:
    """Return the library, built if need be; None where there is none, which is logged once.

    Raises ConfigError for a `SLIPSTREAM_CPU_ISA` that cannot be had.
    """
    asked = os.environ.get(VARIABLE) or None
    if asked is not None and asked not in (*FORMS, "none"):
        raise ConfigError(f"{VARIABLE} = {asked!r} is not one of none, {', '.join(FORMS)}")
    if asked == "none":
        return None
    started = time.perf_counter()
    try:
        flags = tuple(shlex.split(os.environ.get(FLAGS, "")))
        if not path_of(compiler(), flags).is_file():
            _log.warning("building the CPU kernels, once: some half a minute")
        found = Library(built(flags), asked)
    except (BuildError, OSError) as error:
        _log.warning("no CPU kernels: %s; torch's are several times slower at few streams", error)
        return None
    _log.info("CPU kernels: %s (%.1f s)", found.form, time.perf_counter() - started)
    return found


def loaded() -> Library:
    """Return the library where it is known to be there."""
    found = library()
    assert found is not None, "what needs the library asks for it first"
    return found


def num_threads() -> int:
    """Return how many threads share a kernel: as many as torch has."""
    return torch.get_num_threads()


def address(tensor: Tensor | None) -> int | None:
    """Return where a tensor begins; None of None."""
    return None if tensor is None else tensor.data_ptr()
