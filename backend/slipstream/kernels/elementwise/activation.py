"""Activations between the two halves of an MLP: gated (Shazeer, 2020), and of every column.

One has learned numbers (Huang and Schlag, 2024), which are an argument of its kernel.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_PACKS = 4  # accesses of a thread at most
_MAX_THREADS = 256


@op("gate_up[n,_]:T")
def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up = [gate | up]`, in fp32, rounded once: `[n, width / 2]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


@op("gate_up[n,_]:T")
def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` as `silu_mul`; GELU (Hendrycks and Gimpel, 2016) in its tanh form."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


@op("gate_up[n,_]:T")
def gegelu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """`quick_gelu(gate) * (up + 1)` as `silu_mul`; first gates are cut off at `limit`, above alone,
    ups at `limit` and its negative.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (_quick_gelu(gate) * (up + 1)).to(gate_up.dtype)


@op("x[n,_]:T, numbers[_]:f32")
def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """xIELU of every column, in fp32, rounded once: a parabola above 0, below it an exponential.

    `numbers` are alpha of both sides, beta, and what the exponent is at most, below 0.
    """
    above, below, beta, most = numbers
    x32 = x.float()
    curved = (torch.expm1(torch.minimum(x32, most)) - x32) * below
    y: Tensor = torch.where(x32 > 0, above * x32 * x32, curved) + beta * x32
    return y.to(x.dtype)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


GATES = {"silu": silu_mul, "gelu": gelu_mul}  # by the names that layers give them
# By their names in `models/axes.py`. On 16 bits torch computes the first four in fp32 inside.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu, by tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu, squared": _relu_squared,
    "gelu, by a logistic function": _quick_gelu,
}
EVERY = "every "  # in front of an activation's name: it stands in a gate's place


def activate(name: str, y: Tensor) -> Tensor:
    """Apply a gate to `[gate | up]`, or `every NAME`, an activation, to every column."""
    gate = GATES.get(name)
    return ACTIVATIONS[name.removeprefix(EVERY)](y) if gate is None else gate(y)


def _variant(dtype: torch.dtype, vector: int) -> jit.Variant:
    return jit.variant("elementwise/activation.cu", dtype, VECTOR=vector)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in jit.DTYPES:
        for vector in (1, 16 // dtype.itemsize):
            yield _variant(dtype, vector)


@silu_mul.cuda
def _silu_mul(gate_up: Tensor) -> Tensor:
    return _launch("silu_mul", gate_up, _half_width(gate_up))


@gelu_mul.cuda
def _gelu_mul(gate_up: Tensor) -> Tensor:
    return _launch("gelu_mul", gate_up, _half_width(gate_up))


@xielu.cuda
def _xielu(x: Tensor, numbers: Tensor) -> Tensor:
    is_vector = numbers.shape == (4,) and numbers.is_contiguous()
    jit.require(is_vector, "xielu: numbers must be 4, contiguous")
    return _launch("xielu", x, x.shape[1], numbers)


def _half_width(gate_up: Tensor) -> int:
    width = gate_up.shape[1]
    jit.require(width % 2 == 0, "a gate's width {} is odd", width)
    return width // 2


@gegelu_mul.cuda
def _gegelu_mul(gate_up: Tensor, limit: float) -> Tensor:
    return _launch("gegelu_mul", gate_up, _half_width(gate_up), limit)


def _launch(name: str, x: Tensor, width: int, *more: Tensor | float) -> Tensor:
    """Launch a kernel that spreads a row over more threads where there are few rows.

    `more` are arguments behind the results' width.
    """
    jit.type_name(x.dtype)
    num_rows = x.shape[0]
    jit.require(x.stride(1) == 1, "{}: elements of a row must be contiguous", name)
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    vector = jit.vector_width(width, x)
    accesses = -(-width // vector)
    packs = _PACKS if num_rows >= jit.num_multiprocessors(out.get_device()) else 1
    shares = -(-accesses // (_MAX_THREADS * packs))
    threads = 32 * -(-accesses // (32 * packs * shares))
    wanted = _variant(x.dtype, vector)
    grid = (num_rows, shares)
    jit.launch(wanted, name, grid, threads, x, x.stride(0), out, width, *more, overlaps=True)
    return out
