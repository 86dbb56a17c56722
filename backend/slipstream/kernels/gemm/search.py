"""Find the fastest of cuBLASLt's kernels for a GEMM: guess, widen, time, compare.

Of the thousands that are possible, those win that read the weights once: tiles that cover `out` in
few full waves, in small clusters, in a swizzled order. Kernels that split the sum of an element are
left out: they seldom win, and their bits depend on the number of rows. So tiles are ranked by a
model first (`tiles.py`), the best are timed once each, variants of the winners likewise, and the
last few against each other (`trials.py`). What cuBLASLt accepts may be 50 times as slow as it
should be: nothing is chosen that was not timed.

A search is made of pieces of a few milliseconds, between which nothing runs and nothing is held but
the matrices: it can go on beside a server, in its idle time.
"""

import itertools
import math
from collections.abc import Iterator

import torch

from slipstream.kernels.gemm import cublaslt
from slipstream.kernels.gemm.cublaslt_api import Algorithm, Problem
from slipstream.kernels.gemm.cublaslt_groups import measurable
from slipstream.kernels.gemm.tiles import ranked, tile_sizes
from slipstream.kernels.gemm.trials import Found, Operands, Pieces, Trial
from slipstream.kernels.runtime import jit

_NUM_TILES = 24  # timed of those that the model ranks, each in two clusters
_NUM_WIDENED = 4  # whose other clusters and orders are timed
_SINGLE = 2  # 1x1
_VARIANTS = (  # what is tried of the best so far, one after the other
    ("custom", tuple(range(8))),  # order of CTAs; whether two warp groups share a tile
    ("cluster", (2, 3, 4, 5, 6, 7)),
    ("swizzle", (0, 1, 2, 3)),
)


def search(operands: Operands, rows: int) -> Found:
    """Run all pieces of a search, one after the other."""
    pieces = searched(operands, rows)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: Found = end.value
            return found


def searched(operands: Operands, rows: int, longest_s: float = math.inf) -> Pieces:
    """Find the fastest kernel for so many rows on the current device; each `next` is a piece.

    Its output has the default's bits: no token changes where it is taken. Between pieces the GPU
    has nothing to do of it.

    Args:
        operands: matrices, on the current device.
        rows: of x.
        longest_s: of the default: where one launch takes longer, nothing else is tried.

    Raises KernelError if none runs.
    """
    device = torch.cuda.current_device()
    problem = measurable(operands.shape(rows), device)
    num_sms = jit.num_multiprocessors(device)
    default = cublaslt.default(problem)
    trial = Trial(problem, operands)
    yield from trial.time([default])
    if trial.seconds(default) > longest_s:
        return Found(default, trial.seconds(default), trial.seconds(default))
    yield from trial.time(problem.heuristics(0))
    for cluster in {_SINGLE, default.read("cluster")}:
        tilings = _tilings(problem, default, cluster, num_sms)
        yield from trial.time(itertools.islice(tilings, _NUM_TILES))
    for name, values in _VARIANTS:
        for algorithm in trial.best(_NUM_WIDENED):
            changed = (algorithm.changed(**{name: value}) for value in values)
            yield from trial.time(filter(None, map(problem.algorithm_of, changed)))
    return (yield from trial.finish(default))


def _tilings(problem: Problem, like: Algorithm, cluster: int, num_sms: int) -> Iterator[Algorithm]:
    """A kernel for each tile, those that should be the fastest first; none splits the sum."""
    sizes, shape = tile_sizes(), problem.shape
    numbers = {sizes[number]: number for number in like.tiles() if number in sizes}
    same = {"cluster": cluster, "swizzle": 1, "splits": 1, "reduction": 0}
    for tile in ranked(numbers, shape.rows, shape.outputs, num_sms):
        for custom in (0, like.read("custom"), 2, 4, 6):
            blob = like.changed(tile=numbers[tile], custom=custom, **same)
            algorithm = problem.algorithm_of(blob)
            if algorithm is not None:
                yield algorithm
                break
