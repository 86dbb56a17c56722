"""Blocks that are alike: of the same parts, whose tensors lie in memory in the same way.

Such blocks launch the same kernels for the same rows, with other tensors in the same places. A
place for adapters counts as what it is in steps without them.
"""

from collections.abc import Hashable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.runtime import tape

ALIGNED = 16  # bytes: all that a launch asks of an address
_PLAIN = (
    *(bool, int, str, bytes, frozenset, type, Enum),
    *(torch.dtype, torch.device, BuiltinFunctionType, CodeType),
)
# Of parts of blocks. What adapters add differs by layer and step, and what ranks do by launch.
_TAKEN = (
    *("layers", "fuse", "quant", "kernels.attention", "kernels.elementwise"),
    *("kernels.experts", "kernels.gemm"),
)
_LEFT = ("layers.adapted",)


class Form(NamedTuple):
    """What a block is but for the numbers in its tensors."""

    parts: Hashable  # equal: the blocks are alike
    tensors: list[Tensor]  # in the same order in blocks that are alike


def form_of(block: object) -> Form | None:
    """Return the form of a block; None: it has parts of which nothing is known here."""
    tensors: list[Tensor] = []
    try:
        parts = _parts(block, tensors, {})
        return Form((parts, _shared(tensors)), tensors)
    except _UnknownPartError:
        return None


def extent_of(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last; it has some."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize


def _shared(tensors: list[Tensor]) -> Hashable:
    """Return which tensors lie in the memory of others, and how far behind their first byte.

    Launches tell tensors by their addresses.
    """
    found, begin, end, holder = [], 0, 0, -1
    order = [i for i, tensor in enumerate(tensors) if tensor.numel() > 0]
    for number in sorted(order, key=lambda i: (tensors[i].data_ptr(), -extent_of(tensors[i]), i)):
        address = tensors[number].data_ptr()
        if address < end:
            found.append((number, holder, address - begin))
        own = address + extent_of(tensors[number])
        if own > end:
            begin, end, holder = address, own, number
    return tuple(sorted(found))


class _UnknownPartError(Exception):
    pass


def _parts(part: object, tensors: list[Tensor], seen: dict[int, tuple[int, object]]) -> Hashable:
    while hasattr(part, "without_terms"):
        part = part.without_terms
    if part is None or isinstance(part, _PLAIN):
        return type(part), part
    if isinstance(part, float):  # zeros have signs
        return type(part), repr(part)
    if id(part) in seen:
        return "again", seen[id(part)][0]
    seen[id(part)] = len(seen), part  # which stays: another's identity would be the same
    if isinstance(part, Tensor):
        tensors.append(part)
        address = part.data_ptr()
        where = part.shape, part.stride(), address % ALIGNED, tape.lasting_at(address)
        return part.dtype, part.device, *where
    return type(part), *(_parts(inner, tensors, seen) for inner in _inner(part))


def _inner(part: object) -> Iterator[object]:
    """Yield all that an object consists of."""
    if isinstance(part, tuple | list):
        yield from part
    elif isinstance(part, dict):
        yield from part.items()
    elif isinstance(part, partial):
        yield from (part.func, part.args, part.keywords)
    elif isinstance(part, MethodType):
        yield from (part.__func__, part.__self__)
    elif isinstance(part, FunctionType):
        yield from (part.__code__, part.__defaults__, part.__kwdefaults__, *_closure(part))
    elif _is_taken(type(part)):
        for kind in type(part).__mro__:
            for name in getattr(kind, "__slots__", ()):
                yield from (name, getattr(part, name, None))
        yield from getattr(part, "__dict__", {}).items()
    else:
        raise _UnknownPartError


def _closure(function: FunctionType) -> list[object]:
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one is empty
        raise _UnknownPartError from None


def _is_taken(kind: type) -> bool:
    module = f"{kind.__module__}.".removeprefix("slipstream.")
    is_left = module.startswith(_LEFT)
    return not is_left and module.startswith(tuple(f"{name}." for name in _TAKEN))
