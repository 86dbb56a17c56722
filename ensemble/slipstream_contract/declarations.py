"""Declarations of tensors and models, and the lines that the tables of `tensors` are made of.

A line is `name DTYPE[dims]flags =neutral`:

- flags: `?` optional, `~` ragged batches, `r` the model sees a scalar (`reshape { shape: [] }`).
- neutral: the tensor belongs to later work. These values, and no elements at all, have no effect
  and are accepted; everything else is refused as "not supported yet". `=` alone: no value is.

Dims leave the batch dimension out where `max_batch_size` is above 0.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property

import msgspec


class DType(StrEnum):
    """Triton's data types; in config.pbtxt they are `TYPE_` and this name."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    STRING = "STRING"


class Tensor(msgspec.Struct, frozen=True):
    """Declaration of an input or output of a model."""

    name: str
    dtype: DType
    dims: tuple[int, ...]
    is_optional: bool = False
    is_ragged: bool = False
    is_scalar: bool = False  # reshape { shape: [] }
    neutral: tuple[float | str, ...] | None = None  # None: implemented


class Model(msgspec.Struct, frozen=True, dict=True):
    """The interface of a model. `backend` is empty for the true ensemble."""

    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    is_decoupled: bool = False
    has_dynamic_batching: bool = False
    instance_kind: str = "KIND_MODEL"
    num_instances: int = 1  # processes; of an ensemble, where the bridge itself serves it

    @cached_property
    def inputs_by_name(self) -> Mapping[str, Tensor]:
        """Return input name -> tensor; made once, as every request is checked against it."""
        return {tensor.name: tensor for tensor in self.inputs}

    def input(self, name: str) -> Tensor:
        """Return an input's declaration. Raises KeyError."""
        return self.inputs_by_name[name]

    def output(self, name: str) -> Tensor:
        """Return an output's declaration. Raises KeyError."""
        return {tensor.name: tensor for tensor in self.outputs}[name]


_LINE = re.compile(r"(\w+) (\w+)\[([-\d, ]+)\]([?~r]*)( =.*)?")


def tensors_of(table: str) -> tuple[Tensor, ...]:
    """Return the tensors of a table, in its order."""
    return tuple(_tensor(line.strip()) for line in table.splitlines() if line.strip())


def _tensor(line: str) -> Tensor:
    match = _LINE.fullmatch(line)
    assert match is not None, line
    name, dtype, dims, flags, neutral = match.groups()
    return Tensor(
        name,
        DType(dtype),
        tuple(int(dim) for dim in dims.split(",")),
        is_optional="?" in flags,
        is_ragged="~" in flags,
        is_scalar="r" in flags,
        neutral=None if neutral is None else _neutral(DType(dtype), neutral[2:]),
    )


def _neutral(dtype: DType, text: str) -> tuple[float | str, ...]:
    if dtype is DType.STRING:
        return ("", *text.split())
    return tuple(float(value) for value in text.split())
