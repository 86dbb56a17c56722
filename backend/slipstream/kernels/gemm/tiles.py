"""Tiles of cuBLASLt's kernels: their sizes, what they cost by a model, and their names for people.

Tiles win that cover the output in few full waves. The model only ranks: a search times what it
puts first (`search.py`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from functools import cache

from slipstream.kernels.gemm.cublaslt_api import Algorithm

_NUM_ALIKE = 4  # tiles that are kept, as high as each other and in as many waves
_LARGEST_TILE = 256 * 128
_CLUSTER_NAMES = {
    2: "1x1",
    3: "2x1",
    4: "4x1",
    5: "1x2",
    6: "2x2",
    7: "4x2",
    8: "1x4",
    9: "2x4",
    10: "4x4",
    11: "8x1",
    12: "1x8",
    13: "8x2",
    14: "2x8",
    15: "16x1",
    16: "1x16",
}


def ranked(
    tiles: Iterable[tuple[int, int]], rows: int, outputs: int, num_sms: int
) -> list[tuple[int, int]]:
    """Tiles (outputs, rows) by their modelled cost, without the many that hardly differ."""
    kept, num_alike = [], Counter[tuple[int, int]]()
    small = (tile for tile in tiles if math.prod(tile) <= _LARGEST_TILE)
    for tile in sorted(small, key=lambda tile: modelled_cost(tile, rows, outputs, num_sms)):
        kind = (tile[1], _num_waves(tile, rows, outputs, num_sms))
        num_alike[kind] += 1
        if num_alike[kind] <= _NUM_ALIKE:
            kept.append(tile)
    return kept


def _num_waves(tile: tuple[int, int], rows: int, outputs: int, num_sms: int) -> int:
    return math.ceil(math.ceil(outputs / tile[0]) * math.ceil(rows / tile[1]) / num_sms)


def modelled_cost(tile: tuple[int, int], rows: int, outputs: int, num_sms: int) -> float:
    """Clocks for each input that the last multiprocessor is busy, roughly.

    In a clock a multiprocessor takes 32 numbers of 16 bits from the L2 cache and does 2048
    multiplications; the two overlap, and not quite.
    """
    loads, products = sum(tile) / 32, math.prod(tile) / 2048
    cost = max(loads, products) + min(loads, products) / 4
    return _num_waves(tile, rows, outputs, num_sms) * cost


@cache
def tile_sizes() -> dict[int, tuple[int, int]]:
    """(outputs, rows) of cuBLASLt's numbers of tiles, which it lists as they were thought of."""
    first = (
        "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 "
        "64x128 128x64 64x256 128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 "
        "128x160 160x128 192x128 128x192 128x96 32x256 256x32"
    )
    sizes = [(int(a), int(b)) for a, b in (text.split("x") for text in first.split())]
    grids = (  # steps of outputs and rows, for most GEMMs
        (8, 64, 768 * 64),
        (64, 8, 256 * 256),
    )
    for step, row_step, most in grids:
        seen = set(sizes)
        grid = itertools.product(range(step, 769, step), range(row_step, 769, row_step))
        sizes += [size for size in grid if math.prod(size) <= most and size not in seen]
    return dict(enumerate(sizes, start=1))


def describe(algorithm: Algorithm) -> str:
    """Tile (outputs x rows), cluster, order and split: `64x32 cluster 1x2 swizzle 3`."""
    tile, splits = algorithm.read("tile"), algorithm.read("splits")
    size = "x".join(map(str, tile_sizes().get(tile, (f"tile {tile}",))))
    cluster = algorithm.read("cluster")
    parts = [size, f"cluster {_CLUSTER_NAMES.get(cluster, f'#{cluster}')}"]
    parts += [f"option {algorithm.read('custom')}", f"swizzle {algorithm.read('swizzle')}"]
    return " ".join([*parts, *([f"split {splits}"] if splits > 1 else [])])
