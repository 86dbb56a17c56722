"""Finds the fastest of cuBLASLt's kernels for a product: guess, widen, time, compare.

Of the thousands that are possible, those win that read the weights once: tiles that cover `out` in
few full waves, in small clusters, in a swizzled order. Kernels that split the sum of an element are
left out: they seldom win, and their bits depend on the number of rows. So tiles are ranked by a
model first, the best are timed once each, variants of the winners likewise, and the last few
against each other in many rounds, so that all of them see the same clocks. Those of many rows each
make their own: then the GPU is at its power limit, and the fastest needs the least energy.
What cuBLASLt accepts may be 50 times as slow as it should be: nothing is chosen that was not timed.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from slipstream.kernels.gemm import cublaslt
from slipstream.kernels.gemm.cublaslt_api import Algorithm, GemmShape, MatmulPlan, Problem
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError

_PASSED = 160 << 20  # bytes of weights between two uses of one: more than an L2 cache holds
_MAX_COPIES = 32
_NUM_TILES = 24  # timed of those that the model ranks, each in two clusters
_NUM_ALIKE = 4  # of them, as high as each other and in as many waves
_LARGEST_TILE = 256 * 128
_NUM_WIDENED = 4  # whose other clusters and orders are timed
_NUM_FINALISTS = 6
_ROUNDS = 9
_ROUND_S = 4e-4  # of one finalist
_LOAD_ROWS = 1024  # from here on finalists are timed alone, until clocks have settled
_LOADS, _LOAD_S = 3, 0.1  # clocks dip for a moment now and then: the fastest load counts
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
_SINGLE = 2  # 1x1
_VARIANTS = (  # what is tried of the best so far, one after the other
    ("custom", tuple(range(8))),  # order of CTAs; whether two warp groups share a tile
    ("cluster", (2, 3, 4, 5, 6, 7)),
    ("swizzle", (0, 1, 2, 3)),
)
_FEWEST_GAINED = 0.005  # of the default's time: less is noise


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest kernel, and what it gains."""

    algorithm: Algorithm
    seconds: float
    default_seconds: float


class Operands:
    """Random inputs of one product: as many matrices as an L2 cache does not hold, rows for all.

    One that `adds` is timed as it is used: `out` is what is there already.
    """

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, max_rows: int, adds: bool = False
    ) -> None:
        num_bytes = inputs * outputs * dtype.itemsize
        copies = min(_MAX_COPIES, math.ceil(_PASSED / num_bytes))
        self.dtype = dtype
        self.weights = [_random(outputs, inputs, dtype) for _ in range(copies)]
        self.x = _random(max_rows, inputs, dtype)
        self.out_dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
        self.adds = adds
        self.before = _random(max_rows, outputs, self.out_dtype)
        self.out = self.before.clone()
        torch.cuda.synchronize()

    def shape(self, rows: int) -> GemmShape:
        """The product of the first rows."""
        outputs, inputs = self.weights[0].shape
        strides = (inputs, inputs, outputs)
        return GemmShape(rows, inputs, outputs, self.dtype, self.out_dtype, strides, 16, self.adds)


def _random(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Make random values: zeros or small integers need less power and run at other clocks."""
    is_small = dtype == torch.float8_e4m3fn
    values = torch.randn(rows, width, dtype=torch.bfloat16 if is_small else dtype, device="cuda")
    return values.to(dtype)


def search(operands: Operands, rows: int) -> Found:
    """The fastest kernel for so many rows on the current device. Raises KernelError if none runs.

    Its output has the default's bits: no token changes where it is taken.
    """
    device = torch.cuda.current_device()
    problem = Problem(operands.shape(rows), device)
    num_sms = jit.num_multiprocessors(device)
    default = cublaslt.default(problem)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        trial = _Trial(problem, operands, stream)
        trial.time([default, *problem.heuristics(0)])
        for cluster in {_SINGLE, default.read("cluster")}:
            tilings = _tilings(problem, default, cluster, num_sms)
            trial.time(itertools.islice(tilings, _NUM_TILES))
        for name, values in _VARIANTS:
            for algorithm in trial.best(_NUM_WIDENED):
                changed = (algorithm.changed(**{name: value}) for value in values)
                trial.time(filter(None, map(problem.algorithm_of, changed)))
        return trial.finish(default)


# ---- candidates ----


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


# ---- timing ----


class _Trial:
    """Times algorithms for one problem on one stream."""

    def __init__(self, problem: Problem, operands: Operands, stream: torch.cuda.Stream) -> None:
        self._problem = problem
        self._operands = operands
        self._stream = stream.cuda_stream
        self._seconds: dict[Algorithm, float] = {}
        self._begin, self._end = (_event() for _ in range(2))

    def time(self, algorithms: Iterable[Algorithm]) -> None:
        """Once each, over all weights; what is far slower than the best is left after one."""
        count = max(4, len(self._operands.weights))
        for algorithm in algorithms:
            if algorithm in self._seconds:
                continue
            plan = MatmulPlan(self._problem, algorithm)
            try:
                self._launch(plan, 1)  # loads the kernel
            except KernelError:
                continue
            seconds = self._elapsed(partial(self._launch, plan, 1))
            if seconds < 2 * min(self._seconds.values(), default=seconds) + 2e-5:
                seconds = self._elapsed(partial(self._launch, plan, count)) / count
            self._seconds[algorithm] = seconds

    def best(self, count: int) -> list[Algorithm]:
        """The fastest so far."""
        return sorted(self._seconds, key=self._seconds.__getitem__)[:count]

    def finish(self, default: Algorithm) -> Found:
        """The fastest of the best and the default, over many rounds."""
        finalists = [default, *(a for a in self.best(_NUM_FINALISTS) if a != default)]
        if default not in self._seconds:
            raise KernelError(f"{self._problem.shape}: cuBLASLt's own choice does not run")
        figures = self._compare(finalists, min(self._seconds.values()))
        seconds = dict(zip(finalists, figures, strict=True))
        wanted = self._output(default)
        for algorithm in sorted(seconds, key=seconds.__getitem__):
            is_faster = seconds[algorithm] < (1 - _FEWEST_GAINED) * seconds[default]
            if is_faster and torch.equal(self._output(algorithm), wanted):
                return Found(algorithm, seconds[algorithm], seconds[default])
        return Found(default, seconds[default], seconds[default])

    def _compare(self, finalists: list[Algorithm], expected: float) -> list[float]:
        """Seconds of each: in turns, or of many rows by itself, when the clocks have settled."""
        count = max(len(self._operands.weights), math.ceil(_ROUND_S / expected))
        graphs = [self._captured(MatmulPlan(self._problem, a), count) for a in finalists]
        is_load = self._problem.shape.rows >= _LOAD_ROWS
        number = math.ceil(_LOAD_S / 2 / (count * expected)) if is_load else 1
        times: list[list[float]] = [[] for _ in finalists]
        for _ in range(_LOADS if is_load else _ROUNDS):
            for graph, taken in zip(graphs, times, strict=True):
                _replay(graph, number if is_load else 0)
                taken.append(self._elapsed(partial(_replay, graph, number)) / number / count)
        return [min(taken) if is_load else median(taken) for taken in times]

    def _launch(self, plan: MatmulPlan, count: int) -> None:
        operands = self._operands
        for index in range(count):
            weight = operands.weights[index % len(operands.weights)]
            addresses = (operands.x.data_ptr(), weight.data_ptr(), operands.out.data_ptr())
            plan.launch(*addresses, self._stream)

    def _elapsed(self, work: Callable[[], None]) -> float:
        """Seconds on the GPU."""
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3

    def _captured(self, plan: MatmulPlan, count: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            self._launch(plan, count)
        finally:
            graph.capture_end()
        graph.replay()
        return graph

    def _output(self, algorithm: Algorithm) -> Tensor:
        rows = self._problem.shape.rows
        out = self._operands.out[:rows]
        if self._operands.adds:
            out.copy_(self._operands.before[:rows])
        else:
            out.fill_(float("nan"))
        self._launch(MatmulPlan(self._problem, algorithm), 1)
        return out.float()


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> None:
    for _ in range(times):
        graph.replay()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
