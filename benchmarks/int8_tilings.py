"""GEMMs of an 8B's layers in int8 by tiles of any size, in turns with what is chosen, and e4m3.

    python benchmarks/int8_tilings.py [--rows N ...] [--turns N] [--seconds S]

A place is a GEMM with what a step computes around it; `layer` is the four in their order
(`eight_bits.py`). Each is under load for so many seconds a turn; medians are shown in microseconds,
with the tiles (rows of x by outputs, CTAs that share out inputs), and whether both ways made the
same bits of a matrix, or gates about the same. The limit is of GEMMs alone, bytes at 4.707 TB/s or
1,480e12 operations a second. 60 seconds, with what is compiled.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from cases_eight_bits import PRODUCTS as SIZES
from eight_bits import Layer, times
from slipstream.kernels.elementwise.eight_bits import E4M3, INT8, quantize
from slipstream.kernels.gemm import linear
from slipstream.kernels.gemm.op import PLAIN, Matrix
from slipstream.kernels.gemm.sm90 import tall
from slipstream.kernels.runtime import jit
from slipstream.layers.norm import Norm
from slipstream.models.fileless import RandomSource
from slipstream.models.source import Weights
from timing import DTYPE, HIDDEN, need_gpu, rows

NUM_LAYERS = 8  # 134 MB of the smallest matrix: more than the L2 cache
ROWS = (160, 192, 256, 384, 512, 1024, 2048)
WAYS = {"e4m3": (E4M3, False), "int8": (INT8, False), "tiled": (INT8, True)}
_BYTES_S, _OPERATIONS_S = 4.707e12, 1480e12


@contextmanager
def tiled(is_on: bool) -> Iterator[None]:
    """Choose kernels as if products of int8 came by tiles of any size, or not."""
    before = tall.tiles_int8
    tall.tiles_int8 = is_on
    linear.discard_routes()
    try:
        yield
    finally:
        tall.tiles_int8 = before
        linear.discard_routes()


def limit(name: str, num_rows: int) -> float:
    """Return the least seconds of a GEMM, or of a layer's."""
    if name == "layer":
        return sum(limit(each, num_rows) for each in SIZES)
    inputs, outputs = SIZES[name]
    written = num_rows * outputs * (1 if name == "gate_up" else 2)  # half of them, of 2 bytes
    size = inputs * outputs + num_rows * inputs + written
    return max(size / _BYTES_S, 2 * num_rows * inputs * outputs / _OPERATIONS_S)


def tiles(name: str, num_rows: int) -> str:
    """Name the tiles of a GEMM."""
    if name == "layer":
        return ""
    inputs, outputs = SIZES[name]
    with tiled(True):
        sizes = (INT8, num_rows, outputs, inputs // 128, name != "gate_up")
        made = tall.tiling(*sizes, jit.num_multiprocessors(0))
    return f"{made.x_rows} x {made.rows}, {max(1, made.cluster)}"


def compared(name: str, num_rows: int) -> str:
    """Say whether both ways of int8 make the same of a GEMM, whose sums are exact."""
    if name == "layer":
        return ""
    inputs, outputs = SIZES[name]
    x, matrix = rows(num_rows, inputs), Matrix(*quantize(rows(outputs, inputs), INT8))
    found = []
    for is_on in (False, True):
        with tiled(is_on):
            gate = "silu" if name == "gate_up" else ""
            found.append(linear.linear(x, matrix, PLAIN._replace(gate=gate)).float())
    if torch.equal(*found):
        return "same bits"
    error = float((found[0] - found[1]).abs().max() / found[0].abs().max())
    return "about the same" if name == "gate_up" and error < 1e-2 else f"OTHERS, by {error:.1e}"


def measure(
    models: dict[torch.dtype, list[Layer]], name: str, num_rows: int, turns: int, seconds: float
) -> list[float]:
    """Return the seconds of a place in each way."""
    replays = max(10, round(0.6 * seconds / (NUM_LAYERS * limit(name, num_rows))))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in list(WAYS) if turn % 2 == 0 else list(WAYS)[::-1]:
            kind, is_on = WAYS[way]
            with tiled(is_on):
                found[way].append(times(models[kind], name, num_rows, replays)())
    return [median(each) for each in found.values()]


def main() -> None:
    """Print a table, a line as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.1)
    options = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    device = torch.device("cuda")
    norm = Norm(Weights(RandomSource(device, 0), device, DTYPE, "none"), HIDDEN, 1e-5)
    models = {kind: [Layer(kind, norm) for _ in range(NUM_LAYERS)] for kind in (E4M3, INT8)}
    print(f"{torch.cuda.get_device_name()}, {NUM_LAYERS} layers; microseconds of each")
    print(
        " rows  place   "
        + "".join(f"{way:>9}" for way in WAYS)
        + "  tiled / int8  / e4m3  limit / tiled  tiles"
    )
    for num_rows in options.rows:
        for name in (*SIZES, "layer"):
            found = measure(models, name, num_rows, options.turns, options.seconds)
            e4m3, before, after = found
            line = f"{num_rows:5}  {name:8}" + "".join(f"{1e6 * each:9.2f}" for each in found)
            line += (
                f"{after / before:14.3f} {after / e4m3:7.3f} {limit(name, num_rows) / after:14.1%}"
            )
            print(f"{line}  {tiles(name, num_rows):12} {compared(name, num_rows)}", flush=True)


if __name__ == "__main__":
    main()
