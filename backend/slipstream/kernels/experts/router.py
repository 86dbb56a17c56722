"""The router of a few rows: norm, logits, choice and places in one launch."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.experts import route as choosing
from slipstream.kernels.experts.kind import DTYPES, MULTIPLE
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.experts.spec import MAX_EXPERTS, Routing
from slipstream.kernels.runtime import jit, team
from slipstream.kernels.runtime.op import op

MAX_ROWS = 8
_MAX_COLUMNS = MAX_EXPERTS + MULTIPLE
_MAX_WEIGHTS = 2 << 20  # elements, 4 MB: more is read faster by more than eight CTAs
_PAD = 32  # elements behind a row in shared memory
_MAX_BYTES = 76 << 10  # of rows there
_STATIC_BYTES = 27 << 10
_PLAIN_BYTES = 48 << 10  # that a CTA has without asking for more


class Chosen(NamedTuple):
    """A router's rows, its outputs and its choice."""

    x: Tensor  # [n, h], normalised
    outputs: Tensor | None  # [n, m]; None: the choice alone was wanted
    routed: Routed


class RouterStages(NamedTuple):
    """The stages around a router's product; the kernel's argument struct."""

    eps: float  # of the norm
    routing: Routing
    tile_rows: int  # of the GEMMs that follow
    bias: Tensor | None = None  # [m], of outputs
    correction: Tensor | None = None  # [e] f32, as of `route`
    plus_one: bool = False  # as of `rms_norm`
    keeps_outputs: bool = False  # outputs are wanted, too


@op("x[n,h]:T, weight[m,h]:T, norm[h]:T")
def choose_rows(x: Tensor, weight: Tensor, norm: Tensor, stages: RouterStages) -> Chosen:
    """Normalise rows, and choose by the router's outputs, rounded to the rows' dtype.

    Args:
        x: at most MAX_ROWS rows.
        weight: a row for each expert, and others behind them.
        norm: weight of the RMS norm.
        stages: what is done beside the product.
    """
    routing, bias = stages.routing, stages.bias
    normed = rms_norm.oracle(x, norm, stages.eps, stages.plus_one)
    given = None if bias is None else bias.float()
    outputs = functional.linear(normed.float(), weight.float(), given).to(x.dtype)
    logits = outputs[:, : routing.num_experts]
    routed = choosing.route.oracle(logits, routing, stages.tile_rows, stages.correction)
    return Chosen(normed, outputs if stages.keeps_outputs else None, routed)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is the one for rows and a router.

    Sums have an order of their own: deterministic mode has more rows.
    """
    if x.device.type == "cpu" or refusal(x, weight) is not None:
        return False
    return team.team_size(x.get_device()) > 1


def refusal(x: Tensor, weight: Tensor) -> str | None:
    """Say why the kernel is not that of rows and a router on a GPU that has teams; None: it is.

    Teams are clusters. The router must be so small that the CTAs of one read it fast enough.
    """
    num_rows, (columns, width) = len(x), weight.shape
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return "takes rows and weights of 16 bits"
    if not 0 < num_rows <= MAX_ROWS or _bytes(num_rows, width) > _MAX_BYTES:
        return f"takes 1 to {MAX_ROWS} rows of {_MAX_BYTES} bytes together"
    if columns > _MAX_COLUMNS or columns * width > _MAX_WEIGHTS:
        return f"takes {_MAX_COLUMNS} columns and {_MAX_WEIGHTS} weights at most"
    is_aligned = columns % MULTIPLE == 0 and jit.vector_width(width, x, weight) == MULTIPLE
    return None if is_aligned else "takes aligned rows"


def _bytes(num_rows: int, width: int) -> int:
    """Return bytes of rows and a norm's weight in shared memory.

    What does not fit into a CTA's default is counted as more than the default, which the launch
    then raises.
    """
    found = (num_rows + 1) * (width + _PAD) * 2
    return found if found + _STATIC_BYTES <= _PLAIN_BYTES else max(found, _PLAIN_BYTES + 16)


def _variant(dtype: torch.dtype, values: int, is_grouped: bool, plus_one: bool) -> jit.Variant:
    how = {"VALUES": values, "GROUPED": int(is_grouped), "PLUS_ONE": int(plus_one)}
    return jit.variant("experts/router.cu", dtype, FP8=0, GATED=0, **how)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for each in product(DTYPES, choosing.VALUES, (False, True), (False, True)):
        yield _variant(*each)


@choose_rows.cuda
def _choose_rows(x: Tensor, weight: Tensor, norm: Tensor, stages: RouterStages) -> Chosen:
    (num_rows, width), columns = x.shape, len(weight)
    routing, bias = stages.routing, stages.bias
    jit.require(x.dtype in DTYPES, "choose_rows: kernels are for 16 bits, not {}", x.dtype)
    jit.require(0 < num_rows <= MAX_ROWS, "choose_rows: {} rows", num_rows)
    jit.require(_bytes(num_rows, width) <= _MAX_BYTES, "choose_rows: rows of {}", width)
    jit.require(columns <= _MAX_COLUMNS, "choose_rows: {} columns > {}", columns, _MAX_COLUMNS)
    jit.require(columns % MULTIPLE == 0, "choose_rows: {} columns: no multiple of 8", columns)
    jit.require(
        jit.vector_width(width, x, weight, norm) == MULTIPLE, "choose_rows: rows are not aligned"
    )
    jit.require(weight.is_contiguous(), "choose_rows: weights must be contiguous")
    routed = choosing.empty(num_rows, routing, stages.tile_rows, x.device)
    normed = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    outputs = normed.new_empty(num_rows, columns) if stages.keeps_outputs else None
    jit.launch(
        _variant(x.dtype, choosing.values_of(routing), routing.groups > 1, stages.plus_one),
        "route_rows",
        (team.team_size(x.get_device()),),
        team.THREADS,
        *(x, x.stride(0), norm, stages.eps, weight, bias, width, columns),
        *(normed, outputs),
        *choosing.how_to_choose(routed, routing, stages.correction),
        *choosing.where_to_place(routed),
        shared_memory=_bytes(num_rows, width),
        overlaps=True,
    )
    return Chosen(normed, outputs, routed)
