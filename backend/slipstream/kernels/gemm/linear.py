"""Linear layers by GEMMs: the choice of kernels for a product and its stages.

`op.py` says which stages there are, and in which order. A route computes them by at most one kernel
before the GEMM (norm, quantise), the GEMM with what it fuses, and one kernel behind it. The
cheapest route of a spec is chosen once; after that the choice is one look into a dict.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.comm.ranks import Part
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.activation import activate
from slipstream.kernels.elementwise.eight_bits import PRODUCTS, Quantized, Unscaled
from slipstream.kernels.elementwise.norm import RmsNorm
from slipstream.kernels.gemm.op import (
    ALIGNED,
    E4M3,
    PLAIN,
    Around,
    Matrix,
    Spec,
    TermTable,
    adapted_gemm,
    gemm,
    normed,
    spec_of,
)
from slipstream.kernels.gemm.packing import Packing, arranged
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import Implementation, Target, target_of

Operand = Tensor | Quantized  # rows that a GEMM reads
_MOST_ROUTES = 4096


class Path(NamedTuple):
    """Which stages a route computes by kernels of their own; the GEMM computes the others."""

    norms: bool = False
    quantises: bool = False  # and the norm, if that is not done
    finishes: bool = False  # what follows the product: gate and sum
    scales: bool = False  # ... and first its scales and bias: the product is left unscaled
    cost: float = 0.0  # kernels

    def __str__(self) -> str:
        before = [word for word, on in (("norm", self.norms), ("quantise", self.quantises)) if on]
        return " + ".join([*before, "GEMM", *(["behind"] if self.finishes else [])])


class Route(NamedTuple):
    """The kernels of a product and its stages."""

    path: Path
    gemm: Implementation[Spec]


class PathAnswer(NamedTuple):
    """A GEMM's answer to a path: the route and its cost, or why it does not take it."""

    path: Path
    gemm: Implementation[Spec]
    cost: float
    refusal: str | None


_routes: dict[tuple[object, ...], Route] = {}


def paths(spec: Spec) -> Iterator[tuple[Path, Spec]]:
    """Return all paths to a product, each with the spec that is left for the GEMM."""
    befores, packing = [(Path(), spec)], spec.packing
    is_packed = packing is not None and packing.takes_e4m3  # whose kernels scale
    is_scaled = spec.weight in PRODUCTS or is_packed
    if is_scaled and spec.x not in PRODUCTS:
        norms = spec.norm in ("norm plus one", "layer norm")  # no kernel quantises such
        rounded = E4M3 if is_packed else spec.weight
        inner = spec._replace(x=rounded, norm="", norm_aligned=True, scales="both", x_aligned=True)
        inner = inner._replace(x_pitch=spec.inputs % ALIGNED == 0)
        befores.append((Path(norms=norms, quantises=True, cost=1 + norms), inner))
    may_stay = not is_scaled or (packing is not None and packing.can_round_rows)
    if spec.norm and may_stay:
        befores.append((Path(norms=True, cost=1), _without_norm(spec)))
    yield from befores
    for path, inner in befores:
        behind = path._replace(finishes=True, cost=path.cost + 1)
        if inner.scales == "both":
            bare = inner._replace(scales="", bias=False, gate="", residual=False)
            yield behind._replace(scales=True), bare
        if inner.gate and (is_packed or not is_scaled):
            yield behind, inner._replace(gate="", residual=False)


def _without_norm(spec: Spec) -> Spec:
    """Return what is left of a spec for the GEMM if another kernel has computed its norm."""
    pitch = spec.inputs * spec.x.itemsize % ALIGNED == 0
    return spec._replace(norm="", norm_aligned=True, x_aligned=True, x_pitch=pitch)


def answers(spec: Spec) -> list[PathAnswer]:
    """Ask all GEMMs about all paths; the cheapest that is taken comes first."""
    found = []
    for path, inner in paths(spec):
        for each in gemm.implementations.answers(inner, spec.target):
            cost = path.cost + each.cost
            found.append(PathAnswer(path, each.implementation, cost, each.refusal))
    return sorted(found, key=lambda answer: (answer.refusal is not None, answer.cost))


def choose(spec: Spec) -> Route:
    """Return the cheapest route; `KernelError` with all reasons if there is none."""
    best, *_ = found = answers(spec)
    if best.refusal is not None:
        why = "; ".join(f"{each.path}: {each.gemm.name} {each.refusal}" for each in found)
        raise KernelError(f"no kernels for {spec}: {why}")
    return Route(best.path, best.gemm)


def route_of(x: Operand, matrix: Matrix, around: Around = PLAIN) -> Route:
    """Return the route that was chosen for tensors that lie in memory like these."""
    rows = x.values if isinstance(x, Quantized) else x
    values, norm, residual, shift = matrix.values, around.norm, around.residual, around.shift
    key = (
        *(rows.shape, rows.stride(), rows.data_ptr() % ALIGNED, rows.dtype),
        *(values.shape, values.dtype, values.data_ptr() % ALIGNED, values.is_contiguous()),
        None if matrix.groups is None else matrix.groups.packing,
        *(norm is None or norm.data_ptr() % ALIGNED, around.plus_one, around.bias is None),
        *(around.is_centred, shift is None or shift.data_ptr() % ALIGNED),
        *(around.gate, residual is None or residual.dtype, around.out, target_of(rows.device)),
    )
    route = _routes.get(key)
    if route is None:
        gemm.check((rows, values))
        spec = spec_of(rows, values, _with_scales(x, matrix, around))
        if len(_routes) >= _MOST_ROUTES:
            _routes.clear()
        route = _routes[key] = choose(spec)
    return route


def takes_quantized(matrix: Matrix, num_rows: int, dtype: torch.dtype) -> bool:
    """Return whether so many rows, which have a dtype else, may come in 8 bits, of the type that
    the matrix `rounds_to`, as a kernel before quantised them.
    """
    groups = matrix.groups
    if groups is None or not groups.packing.can_round_rows or not groups.is_plain:
        return matrix.takes_quantized
    return _are_rounded(groups.packing, num_rows, dtype, target_of(matrix.values.device))


@functools.lru_cache(_MOST_ROUTES)
def _are_rounded(packing: Packing, num_rows: int, dtype: torch.dtype, target: Target) -> bool:
    sizes = (num_rows, packing.inputs, packing.outputs)
    plain = Spec(*sizes, dtype, torch.int32, dtype, "", "", False, "", False, *(True,) * 4, target)
    return choose(plain._replace(packing=packing)).path.quantises


def multiply(x: Operand, matrix: Matrix, around: Around = PLAIN) -> Tensor | Unscaled:
    """`x W^T` with all that is around it: `[n, m]`, `[n, m / 2]` behind a gate.

    `around.residual` is added to, and returned. `Unscaled` where no kernel scales the product
    itself; neither gate nor sum are made then.

    Args:
        x: rows of 16 or 32 bits, or quantised ones.
        matrix: the weights.
        around: the stages, without scales: these come with `x` and `matrix`.
    """
    return follow(route_of(x, matrix, around), x, matrix, around)


def multiply_adapted(x: Operand, matrix: Matrix, around: Around, terms: TermTable) -> Tensor | None:
    """`multiply` with the terms of adapters, before gate and sum, in one kernel; a norm that the
    kernel does not compute is one before it.

    None, and nothing done: no kernel takes it all.
    """
    assert around.addend is None, "a term is of complete rows"
    if isinstance(x, Quantized):
        return None
    around = _with_scales(x, matrix, around)
    spec = spec_of(x, matrix.values, around)
    run = _adapted_by(spec)
    if run is None and around.norm is not None:
        run = _adapted_by(_without_norm(spec))
        if run is not None:
            x, around = normed(x, around), around._replace(norm=None, eps=0.0)
    return None if run is None else run(x, matrix.values, around, terms)


@functools.lru_cache(_MOST_ROUTES)
def _adapted_by(spec: Spec) -> Callable[..., Tensor] | None:
    found = adapted_gemm.choose(spec, spec.target)
    return None if found is None else found.implementation.run


def linear(x: Tensor, matrix: Matrix, around: Around = PLAIN) -> Tensor:
    """`multiply`, finished by kernels behind the product where it is left unscaled."""
    y = multiply(x, matrix, around)
    if isinstance(y, Tensor):
        return y
    if around.residual is None or around.gate:
        return _finish(y.finish(x.dtype), around)
    y.add_to(around.residual)
    return around.residual


def follow(route: Route, x: Operand, matrix: Matrix, around: Around) -> Tensor | Unscaled:
    """`multiply` by a route."""
    path, run = route.path, route.gemm.run
    if path.quantises and matrix.groups is not None and not matrix.groups.is_plain:
        x, around = _arranged(x, matrix, around)
    rows = _before(path, x, around, matrix.rounds_to)
    if isinstance(rows, Quantized) or matrix.scales is not None or matrix.groups is not None:
        around = _with_scales(rows, matrix, around)
    if isinstance(rows, Quantized) and isinstance(x, Tensor):
        around = around._replace(out=x.dtype)
    if path.norms:
        around = around._replace(norm=None, eps=0.0)
    values = rows.values if isinstance(rows, Quantized) else rows
    if not path.finishes:
        y: Tensor = run(values, matrix.values, around)
        return y
    if path.scales:
        bare = PLAIN._replace(groups=matrix.groups)
        return Unscaled(run(values, matrix.values, bare), around.scales_behind)
    return _finish(run(values, matrix.values, around._replace(gate="", residual=None)), around)


def _arranged(x: Operand, matrix: Matrix, around: Around) -> tuple[Operand, Around]:
    """Compute what is quantised where inputs do not come as codes lie: the norm, then their order
    and factors.
    """
    assert matrix.groups is not None, "weights are packed"
    assert isinstance(x, Tensor), "who quantises for several asks for plain inputs"
    path = Path(norms=around.norm is not None)
    rows = _before(path, x, around, matrix.rounds_to)
    assert isinstance(rows, Tensor), "it is not quantised yet"
    return arranged(rows, matrix.groups), around._replace(norm=None, eps=0.0, addend=None)


def _finish(y: Tensor, around: Around) -> Tensor:
    """Apply gate and sum, each by a kernel of its own."""
    y = activate(around.gate, y) if around.gate else y
    return y if around.residual is None else around.residual.add_(y)


def _before(path: Path, x: Operand, around: Around, dtype: torch.dtype) -> Operand:
    """Compute what comes before the product by kernels of its own; `dtype`, of quantised rows."""
    if isinstance(x, Quantized):
        return x
    norm, addend = around.norm, around.addend
    if path.quantises and not path.norms and norm is not None:
        if isinstance(addend, Unscaled) and addend.values == dtype:
            product, (rows, columns, bias) = addend
            return eight_bits.add_norm_quantize(x, norm, product, rows, columns, around.eps, bias)
        if addend is not None:
            addend.add_to(x)
        return eight_bits.norm_quantize(x, norm, around.eps, dtype)
    is_rms = path.norms and norm is not None and not around.is_centred
    if is_rms and norm is not None and isinstance(addend, Part):
        x = addend.add_norm(x, RmsNorm(norm, around.eps, around.plus_one))
        return eight_bits.quantize(x, dtype) if path.quantises else x
    if addend is not None:
        addend.add_to(x)
    if path.norms:
        x = normed(x, around)
    return eight_bits.quantize(x, dtype) if path.quantises else x


def _with_scales(x: Operand, matrix: Matrix, around: Around) -> Around:
    """Say which scales the product has; the norm of quantised rows is computed."""
    if isinstance(x, Quantized):
        around = around._replace(norm=None, rows=x.scales)
    return around._replace(columns=matrix.scales, groups=matrix.groups)
