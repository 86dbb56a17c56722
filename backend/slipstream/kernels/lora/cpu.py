"""Low-rank terms on the processor, by the kernels in C++: two calls a place for all adapters."""

from ctypes import c_int64

import torch
from torch import Tensor

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.native import library
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.lora.terms import (
    PARTS,
    ExpandCall,
    ShrinkCall,
    expand,
    expand_new,
    shrink,
)
from slipstream.kernels.runtime.flat import flattened

_Sizes = c_int64 * PARTS


def _takes(spec: tuple[tuple[object, ...], ...]) -> str | None:
    if spec[0][1] != torch.float32:
        return "takes rows of fp32"
    return "is not built" if library() is None else None


@shrink.implementation("C++", "cpu", takes=_takes, cost=0.5)
@flattened(ShrinkCall)
def shrunk(call: ShrinkCall) -> Tensor:
    """Implement `shrink`; a row's bits never depend on others."""
    x, groups, rows, place, width, norm, _, factors, _ = call
    if x.stride(1) != 1:
        x = x.contiguous()
    product = native.Product()
    product.weights.inputs = x.shape[1]
    if norm is not None and norm.weight.dtype == torch.float32 and norm.weight.is_contiguous():
        product.norm, product.eps = norm.weight.data_ptr(), norm.eps
        product.norm_offset = float(norm.plus_one)
    elif norm is not None:
        x = rms_norm(x, *norm)
    found = x.new_empty((1, len(rows), width))
    terms = _terms(groups, rows, found, place)
    native.loaded().shrink(terms, product, x.data_ptr(), x.stride(0), native.num_threads())
    return found if factors is None else found.mul_(factors[:, None])


@expand.implementation("C++", "cpu", takes=_takes, cost=0.5)
@flattened(ExpandCall)
def expanded(call: ExpandCall) -> Tensor:
    """Implement `expand` of what `shrunk` made; torch does what is strided or split."""
    y, groups, rows, partial, place, sizes, _ = call
    if y.stride(1) != 1 or partial.shape[0] != 1 or not partial.is_contiguous():
        return expand.oracle(*call)
    terms = _terms(groups, rows, partial, place)
    own = _Sizes(*sizes)
    native.loaded().expand(terms, own, y.data_ptr(), y.stride(0), native.num_threads())
    return y


@expand_new.implementation("C++", "cpu", takes=_takes, cost=0.5)
@flattened(ExpandCall)
def _made(call: ExpandCall) -> Tensor:
    """Implement `expand_new`; of other rows `y` has zeros."""
    call.y.zero_()
    return expanded(*call)


def _terms(groups: Tensor, rows: Tensor, partial: Tensor, place: int) -> native.Terms:
    assert groups.is_contiguous(), "tables lie in one piece"
    assert rows.is_contiguous(), "tables lie in one piece"
    where = (each.data_ptr() for each in (groups, rows, partial))
    return native.Terms(*where, len(groups), place, partial.shape[2])
