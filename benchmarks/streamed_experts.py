"""Layers of experts in e4m3 whose places are e4m3, too, in turns with what is chosen.

    python benchmarks/streamed_experts.py [--rows N ...] [--models NAME ...] [--turns N] [--tiles]

For each number of rows: microseconds of gates and ups, of outputs, and of a layer with its router,
and the share of what the bytes of distinct experts take; the places' rounding is in all of them.
`old` are tiles of 16-bit rows, `new` is `experts/sm90/streamed.cu`; each is followed by its rows of
a tile. The error is of what `new` makes of rounded places against fp32, over the largest value, and
beside it whether a second run has the same bits. `--tiles` times `new` by every size of tiles, too.
60 seconds without it, with what is compiled.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from experts import MODELS, Layer, make_layers, timed
from limits import rates_of
from slipstream.kernels.elementwise.eight_bits import quantize
from slipstream.kernels.experts.grouped import down, gate_up, tile_rows
from slipstream.kernels.experts.sm90 import streamed
from slipstream.kernels.experts.spec import Gate
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.runtime.registry import target_of
from timing import need_gpu, rows

ROWS = {"Mixtral-8x7B": (8, 32, 64, 128, 256), "Qwen3-30B-A3B": (32, 128)}
WAYS = {"old": False, "new": True}
PARTS = ("gate_up", "down", "layer")


@contextmanager
def places_rounded(is_on: bool) -> Iterator[None]:
    """Choose kernels as if places were rounded to e4m3, or not."""
    before = streamed.is_on
    streamed.is_on = is_on
    try:
        yield
    finally:
        streamed.is_on = before


def rows_of_tile(layer: Layer, n: int, is_on: bool) -> int:
    """Return the rows of a tile that are chosen."""
    model, target = layer.model, target_of(layer.router.device)
    with places_rounded(is_on):
        return tile_rows(n * model.top_k, model.experts, True, target=target)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return rows in fp32 as e4m3 has them."""
    values, scales = quantize(x)
    return values.float() * scales[:, None]


def compared(layer: Layer, n: int) -> str:
    """Say how far both GEMMs are from fp32, and whether they repeat."""
    x = rows(n, layer.model.hidden)
    routed = layer.route(linear(x, Matrix(layer.router)), rows_of_tile(layer, n, True))
    runs = []
    with places_rounded(True):
        for _ in range(2):
            inner = layer.up(x, routed)
            runs.append((inner, layer.out(inner, routed)))
    inner, found = runs[0]
    up, last = layer.gate_up, layer.down
    wanted = (
        gate_up.oracle(rounded(x), up.values, up, routed, Gate.SILU),
        down.oracle(rounded(inner), last.values, last, routed),
    )
    errors = [
        float((one.float() - other).abs().max() / other.abs().max())
        for one, other in zip((inner, found), wanted, strict=True)
    ]
    same = all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    said = " ".join(f"{error:.1e}" for error in errors)
    return f"error {said}, {'repeats' if same else 'DOES NOT REPEAT'}"


def measure(layers: list[Layer], n: int, turns: int) -> None:
    """Print a line of both ways."""
    rate = rates_of(torch.cuda.get_device_name(), {}).read
    found: dict[str, list[dict[str, tuple[float, float]]]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in list(WAYS) if turn % 2 == 0 else list(WAYS)[::-1]:
            size = rows_of_tile(layers[0], n, WAYS[way])
            with places_rounded(WAYS[way]):
                torch.manual_seed(n)  # the same choice of experts
                found[way].append(timed(layers, n, size))
    line, whole = f"{layers[0].model.name:14} {n:4}", []
    for way, all_runs in found.items():
        line += f"  {way} {rows_of_tile(layers[0], n, WAYS[way]):3}:"
        for part in PARTS:
            seconds = median(run[part][0] for run in all_runs)
            line += f" {seconds * 1e6:7.1f} {all_runs[0][part][1] / rate / seconds:4.0%}"
        whole.append(median(run["layer"][0] for run in all_runs))
    print(f"{line}  new / old {whole[1] / whole[0]:.3f}  {compared(layers[0], n)}", flush=True)


def by_tiles(layers: list[Layer], n: int) -> None:
    """Print what layers take by tiles of each size."""
    found = []
    with places_rounded(True):
        for size in streamed.TILE_ROWS:
            torch.manual_seed(n)
            found.append(f"{size} {timed(layers, n, size)['layer'][0] * 1e6:.1f}")
    print(f"{'':19}  a layer by tiles of {', '.join(found)}", flush=True)


def main() -> None:
    """Time what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", help="instead of each model's own")
    parser.add_argument("--models", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tiles", action="store_true", help="every size of tiles, too")
    options = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}: us of {', '.join(PARTS)}, share of the byte limit")
    for model in MODELS:
        if model.name not in options.models:
            continue
        layers = make_layers(model, "e4m3", None)
        for n in options.rows or ROWS[model.name]:
            measure(layers, n, options.turns)
            if options.tiles:
                by_tiles(layers, n)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
