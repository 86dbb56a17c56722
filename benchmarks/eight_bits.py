"""GEMMs of Llama-3.1-8B's layers in int8 beside e4m3, with all that a step computes around them.

    python benchmarks/eight_bits.py [--rows N ...] [--turns N] [--without tall]

A place is the norm or the quantising before a GEMM, the GEMM, and what follows it, as a step runs
them; `layer` is the four in their order. Each of 32 layers has weights of its own. The two types
take turns, the median of whose graphs is shown in microseconds. The limit is of GEMMs alone, bytes
at 4.707 TB/s or 1,480e12 operations a second; from 129 rows on the tiles of int8 follow (rows of x
by outputs, CTAs that share out inputs). `slipstream tune` goes first, if it is to count.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch
from cases_eight_bits import PRODUCTS as SIZES
from slipstream import quant
from slipstream.fuse.rewrite import Place, fused
from slipstream.kernels.elementwise.eight_bits import E4M3, INT8, quantize
from slipstream.kernels.gemm.op import Matrix, gemm
from slipstream.kernels.gemm.sm90 import tall
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import Implementations
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.models.fileless import RandomSource
from slipstream.models.source import Weights
from timing import DTYPE, HIDDEN, need_gpu, rows, time_graph

KINDS = {"e4m3": E4M3, "int8": INT8}
NUM_LAYERS = 32
ROWS = (1, 2, 16, 64, 128, 160, 256, 512, 1024, 2048, 8192)
_BYTES_S, _OPERATIONS_S = 4.707e12, 1480e12


class Layer:
    """The places of a block, without attention."""

    def __init__(self, kind: torch.dtype, norm: Norm) -> None:
        linears = {name: _linear(kind, *size) for name, size in SIZES.items()}
        self._norm = norm
        self._qkv = fused(NormLinear(linears["qkv"], leaves_scales=True))
        self._o = fused(LinearAdd(linears["o"]))
        self._gate_up = fused(GatedLinear(linears["gate_up"], "silu"), linears["down"])
        self._down = fused(LinearAdd(linears["down"]))
        self._gated: object = None

    def run(self, name: str, x: torch.Tensor, residual: Residual) -> None:
        """Run a place, or all; `x` is what attention would give."""
        if name in ("qkv", "layer"):
            self._behind_norm(self._qkv, residual)
        if name in ("o", "layer"):
            self._add(self._o, x, residual)
        if name in ("gate_up", "layer"):
            self._gated = self._behind_norm(self._gate_up, residual)
        if name in ("down", "layer"):
            self._add(self._down, self._gated, residual)
        if name in ("o", "down"):
            _ = residual.values  # else the next place adds what waits

    def _behind_norm(self, place: Place, residual: Residual) -> object:
        assert isinstance(place, NormLinear | GatedLinear)
        return place(self._norm, residual)

    def _add(self, place: Place, x: object, residual: Residual) -> None:
        assert isinstance(place, LinearAdd)
        place(x, residual)  # type: ignore[arg-type]


def _linear(kind: torch.dtype, inputs: int, outputs: int) -> Linear:
    matrix = Matrix(*quantize(rows(outputs, inputs) * inputs**-0.5, kind))
    return Linear(quant.named("fp8"), matrix)


def limit(name: str, num_rows: int) -> float:
    """Return the least seconds of a GEMM, or of a layer's."""
    if name == "layer":
        return sum(limit(each, num_rows) for each in SIZES)
    inputs, outputs = SIZES[name]
    written = num_rows * outputs * (1 if name == "gate_up" else 2)  # half of them, of 2 bytes
    size = inputs * outputs + num_rows * inputs + written
    return max(size / _BYTES_S, 2 * num_rows * inputs * outputs / _OPERATIONS_S)


def tiles(name: str, num_rows: int) -> str:
    """Name the tiles of a GEMM of int8, if it is tall."""
    if name == "layer" or num_rows < tall.MIN_ROWS[INT8]:
        return ""
    inputs, outputs = SIZES[name]
    sizes = (INT8, num_rows, outputs, inputs // 128, name != "gate_up")
    made = tall.tiling(*sizes, jit.num_multiprocessors(0))
    return f"{made.x_rows} x {made.rows}, {max(1, made.cluster)}"


def times(layers: Sequence[Layer], name: str, num_rows: int) -> Callable[[], float]:
    """Return what measures a place, in seconds for each layer."""
    x, values = rows(num_rows, HIDDEN), rows(num_rows, HIDDEN)
    if name == "down":
        for layer in layers:
            layer.run("gate_up", x, Residual(values))

    def runs() -> list[Callable[[], object]]:
        made = Residual(values)
        return [lambda layer=layer: layer.run(name, x, made) for layer in layers]  # type: ignore[misc]

    return lambda: time_graph(runs())


def leave_out(names: Sequence[str]) -> None:
    """Multiply without these implementations: by what comes next."""
    kept = Implementations[object]()
    for each in gemm.implementations:
        if each.name not in names:
            kept.add(each)
    gemm.implementations = kept


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--without", nargs="+", default=(), help="GEMMs to do without: tall, ...")
    options = parser.parse_args()
    need_gpu()
    leave_out(options.without)
    torch.manual_seed(0)
    device = torch.device("cuda")
    norm = Norm(Weights(RandomSource(device, 0), device, DTYPE, "none"), HIDDEN, 1e-5)
    models = {name: [Layer(kind, norm) for _ in range(NUM_LAYERS)] for name, kind in KINDS.items()}
    print(f"{torch.cuda.get_device_name()}, {NUM_LAYERS} layers; microseconds of each")
    print(f"{'rows':>5}  {'place':8} {'e4m3':>10} {'int8':>10}  int8 / e4m3   limit")
    for num_rows in options.rows:
        for place in (*SIZES, "layer"):
            found: dict[str, list[float]] = {name: [] for name in models}
            clocks = {name: times(layers, place, num_rows) for name, layers in models.items()}
            for _ in range(options.turns):
                for name, clock in clocks.items():
                    found[name].append(clock())
            one, other = (median(each) * 1e6 for each in found.values())
            line = f"{num_rows:5}  {place:8} {one:10.2f} {other:10.2f}  {other / one:7.3f}"
            share = 1e6 * limit(place, num_rows) / other
            print(f"{line} {share:11.1%}  {tiles(place, num_rows)}", flush=True)


if __name__ == "__main__":
    main()
