"""Time kernels of cuBLASLt for one GEMM: once each, then the best against each other.

The best are timed in many rounds, in turns, so that all of them see the same clocks. Those of many
rows each make their own: then the GPU is at its power limit, and the fastest needs the least
energy. A kernel counts only if it has the default's bits.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import INT8, PRODUCTS
from slipstream.kernels.gemm import cublaslt
from slipstream.kernels.gemm.cublaslt_api import Algorithm, GemmShape, MatmulPlan, Problem
from slipstream.kernels.gemm.cublaslt_groups import measurable
from slipstream.kernels.runtime.collection import without_collection
from slipstream.kernels.runtime.op import KernelError

_PASSED = 160 << 20  # bytes of weights between two uses of one: more than an L2 cache holds
_MAX_COPIES = 32
_NUM_FINALISTS = 6
_ROUNDS, _ROUND_S = 9, 4e-4  # of one finalist
_PIECE_S = 2e-3  # of launches that are timed together, unless one alone takes longer
_LONG_S = 2e-5  # of a GEMM beyond which the host launches faster than the GPU computes
_LOAD_ROWS = 1024  # from here on finalists are timed alone, until clocks have settled
_LOADS, _LOAD_S = 3, 0.1  # clocks dip for a moment now and then: the fastest load counts
_FEWEST_GAINED = 0.005  # of the default's time: less is noise
_NUM_PROOFS = 4  # matrices, and rows, with which a kernel must have the default's bits

Pieces = Generator[None, None, "Found"]  # each `next` is a piece of a few milliseconds


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest kernel, and what it gains."""

    algorithm: Algorithm
    seconds: float
    default_seconds: float


@dataclass(frozen=True, slots=True)
class Operands:
    """The matrices of one GEMM, in turns: together more than an L2 cache holds, if they can.

    One that `adds` is timed as it is used: `out` is what is there already. Rows are made anew for
    each piece of a search.
    """

    weights: Sequence[Tensor]  # equal in shape and dtype, contiguous
    adds: bool = False
    x_scales: str = ""  # of a GEMM by groups: how x is scaled

    @staticmethod
    def random(inputs: int, outputs: int, dtype: torch.dtype, adds: bool = False) -> "Operands":
        """Make matrices of random values."""
        num_bytes = inputs * outputs * dtype.itemsize
        copies = min(_MAX_COPIES, math.ceil(_PASSED / num_bytes))
        return Operands([_random(outputs, inputs, dtype) for _ in range(copies)], adds)

    @staticmethod
    def of(weights: Sequence[Tensor], adds: bool) -> "Operands":
        """Take as many matrices of a model as an L2 cache does not hold."""
        copies = min(_MAX_COPIES, math.ceil(_PASSED / weights[0].nbytes))
        return Operands(weights[:copies], adds)

    @property
    def dtype(self) -> torch.dtype:
        """Name the dtype of x and weights."""
        return self.weights[0].dtype

    @property
    def out_dtype(self) -> torch.dtype:
        """Name the dtype of the output."""
        return PRODUCTS.get(self.dtype, self.dtype)

    def shape(self, rows: int) -> GemmShape:
        """Return the GEMM of so many rows."""
        outputs, inputs = self.weights[0].shape
        strides = (inputs, inputs, outputs)
        sizes, types = (rows, inputs, outputs), (self.dtype, self.out_dtype)
        return GemmShape(*sizes, *types, strides, 16, self.adds, self.x_scales)

    def x(self, rows: int) -> Tensor:
        """Make rows."""
        return _random(rows, self.weights[0].shape[1], self.dtype)

    def out(self, rows: int) -> Tensor:
        """Make what a GEMM is added to; where nothing is added, NaN, or -1 of integers."""
        size, dtype = (rows, self.weights[0].shape[0]), self.out_dtype
        empty = math.nan if dtype.is_floating_point else -1
        made = torch.full(size, empty, dtype=dtype, device="cuda")
        return _random(*size, dtype) if self.adds else made


def _random(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Make random values: zeros or small integers need less power and run at other clocks."""
    drawn = torch.bfloat16 if dtype in PRODUCTS else dtype
    values = torch.randn(rows, width, dtype=drawn, device="cuda")
    return (values * 40).clamp(-127, 127).to(dtype) if dtype == INT8 else values.to(dtype)


class Trial:
    """Times algorithms for one problem, on a stream of its own."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self._problem = problem
        self._operands = operands
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._seconds: dict[Algorithm, float] = {}
        self._begin, self._end = (_event() for _ in range(2))
        self._x = self._out = torch.empty(0)  # of the piece that runs

    def time(self, algorithms: Iterable[Algorithm]) -> Iterator[None]:
        """Once each, over all weights; what is far slower than the best is left after one.

        Each is a piece.
        """
        for algorithm in algorithms:
            if algorithm not in self._seconds:
                with self._piece():
                    self._time(algorithm)
                yield

    def seconds(self, algorithm: Algorithm) -> float:
        """What an algorithm took. Raises KernelError if it does not run."""
        if algorithm not in self._seconds:
            raise KernelError(f"{self._problem.shape}: cuBLASLt's own choice does not run")
        return self._seconds[algorithm]

    def _time(self, algorithm: Algorithm) -> None:
        plan = MatmulPlan(self._problem, algorithm)
        try:
            self._launch(plan, 1)  # loads the kernel
        except KernelError:
            return
        seconds = self._elapsed(partial(self._launch, plan, 1))
        if seconds < 2 * min(self._seconds.values(), default=seconds) + 2e-5:
            count = self._fitting(max(4, len(self._operands.weights)), seconds)
            if count > 1:
                seconds = self._elapsed(partial(self._launch, plan, count)) / count
        self._seconds[algorithm] = seconds

    def best(self, count: int) -> list[Algorithm]:
        """The fastest so far."""
        return sorted(self._seconds, key=self._seconds.__getitem__)[:count]

    def finish(self, default: Algorithm) -> Pieces:
        """The fastest of the best and the default, over many rounds."""
        self.seconds(default)
        finalists = [default, *(a for a in self.best(_NUM_FINALISTS) if a != default)]
        figures = yield from self._compare(finalists)
        seconds = dict(zip(finalists, figures, strict=True))
        for algorithm in sorted(seconds, key=seconds.__getitem__):
            is_faster = seconds[algorithm] < (1 - _FEWEST_GAINED) * seconds[default]
            if is_faster and (yield from self._has_bits_of(default, algorithm)):
                return Found(algorithm, seconds[algorithm], seconds[default])
        return Found(default, seconds[default], seconds[default])

    def _compare(self, finalists: list[Algorithm]) -> Generator[None, None, list[float]]:
        """Seconds of each: in turns, or of many rows by itself, when the clocks have settled."""
        is_load = self._problem.shape.rows >= _LOAD_ROWS
        times: list[list[float]] = [[] for _ in finalists]
        for _ in range(_LOADS if is_load else _ROUNDS):
            for algorithm, taken in zip(finalists, times, strict=True):
                taken.append((yield from self._load_of(algorithm, is_load)))
        return [min(taken) if is_load else median(taken) for taken in times]

    def _load_of(self, algorithm: Algorithm, is_load: bool) -> Generator[None, None, float]:
        """Seconds of a launch in one piece, or in the second half of a load's."""
        expected, run_s = self._seconds[algorithm], self._replayed
        count, number = max(len(self._operands.weights), math.ceil(_ROUND_S / expected)), 1
        if is_load:
            count = math.ceil(_PIECE_S / expected)
            number = math.ceil(_LOAD_S / 2 / (self._fitting(count, expected) * expected))
            run_s = self._launched if expected > _LONG_S else run_s
        pieces = []
        for _ in range(2 * number if is_load else 1):
            with self._piece():
                pieces.append(run_s(algorithm, self._fitting(count, expected)))
            yield
        return sum(pieces[-number:]) / number

    def _fitting(self, count: int, seconds: float) -> int:
        """Return how many launches of so long each fit into a piece, `count` at most."""
        return max(1, min(count, int(_PIECE_S / max(seconds, 1e-9))))

    @contextmanager
    def _piece(self) -> Iterator[None]:
        """Have rows at hand, and run on the stream; leave nothing behind on the GPU.

        Rows come from the memory of the caller's stream, whose steps have it again afterwards.
        """
        rows = self._problem.shape.rows
        self._x, self._out = self._operands.x(rows), self._operands.out(rows)
        try:
            with self._alone():
                yield
        finally:
            self._x = self._out = torch.empty(0)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run on the stream, behind what the caller's has, and wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def _launch(self, plan: MatmulPlan, count: int) -> None:
        weights = self._operands.weights
        for index in range(count):
            weight = weights[index % len(weights)]
            addresses = (self._x.data_ptr(), weight.data_ptr(), self._out.data_ptr())
            plan.launch(*addresses, self._stream.cuda_stream)

    def _elapsed(self, work: Callable[[], None]) -> float:
        """Seconds on the GPU."""
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3

    def _launched(self, algorithm: Algorithm, count: int) -> float:
        """Seconds of a launch, of so many one after the other."""
        plan = MatmulPlan(self._problem, algorithm)
        return self._elapsed(partial(self._launch, plan, count)) / count

    def _replayed(self, algorithm: Algorithm, count: int) -> float:
        """Seconds of a launch, of so many in a graph, the second time that it runs."""
        plan = MatmulPlan(self._problem, algorithm)
        with without_collection():
            graph = self._captured(plan, count)
        graph.replay()
        return self._elapsed(graph.replay) / count

    def _captured(self, plan: MatmulPlan, count: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._launch(plan, count)
        finally:
            graph.capture_end()
        return graph

    def _has_bits_of(self, default: Algorithm, algorithm: Algorithm) -> Generator[None, None, bool]:
        """Whether outputs are the same, bit for bit, with several matrices, and rows made for each.

        Of fewer rows, too, a multiple of 4: it is taken for those.
        """
        rows, weights = self._problem.shape.rows, self._operands.weights
        for index in range(_NUM_PROOFS):
            weight = weights[index % len(weights)]
            given = rows if index % 2 == 0 else max(1, (rows - max(8, rows // 16)) // 4 * 4)
            is_same = self._agree(default, algorithm, weight, given)
            yield
            if not is_same:
                return False
        return True

    def _agree(self, default: Algorithm, algorithm: Algorithm, weight: Tensor, rows: int) -> bool:
        """Whether two kernels make the same bits of new rows; of fewer, its default."""
        problem, other = self._problem, algorithm
        if rows != problem.shape.rows:
            problem = measurable(self._operands.shape(rows), problem.device)
            default = cublaslt.default(problem)
            found = problem.algorithm_of(algorithm.blob)
            if found is None:
                return True  # the default is taken there
            other = found
        x, first = self._operands.x(rows), self._operands.out(rows)
        second = first.clone()
        with self._alone():
            for each, out in ((default, first), (other, second)):
                addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
                MatmulPlan(problem, each).launch(*addresses, self._stream.cuda_stream)
        return torch.equal(first.view(torch.int16), second.view(torch.int16))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
