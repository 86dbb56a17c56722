"""GEMMs of drawn shapes: what is taken without tuning beside what `slipstream tune` finds.

    python benchmarks/idle_tuning.py [--shapes 20] [--seconds 100] [--seed 0] [--json FILE]

Shapes have 512 to 16,384 inputs and outputs, in steps of 64, and 1 to 2,048 rows, both drawn evenly
by their logarithm. In idle time the search is for the number of rows that is kept for the shape
(`Choices.find`), in pieces with a pause between them as a loop makes; `slipstream tune` is the same
search at the very rows, at once. `finer` is the search for rows that are kept at half the distance.
Where a kernel of our own takes the GEMM, it counts as what is taken, and stands beside cuBLASLt's.
Then all run in turns. Nothing is kept on disk but FILE, which is written after each shape.
It prints a line for each shape, the share of shapes within 3 %, and the longest pieces.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

import torch
from slipstream.kernels.gemm import cublaslt, search, trials, tuning
from slipstream.kernels.gemm.cublaslt_api import Algorithm, MatmulPlan, Problem
from slipstream.kernels.gemm.linear import linear, route_of
from slipstream.kernels.gemm.op import Matrix
from slipstream.runner.idle_tuning import covering_rows
from timing import need_gpu

WIDTHS, ROWS, STEP = (512, 16_384), (1, 2_048), 64
WITHIN = 1.03
PAUSE_S = 2e-4  # of a loop between two pieces
ROUNDS, ROUND_S = 11, 1e-3


@dataclass
class Line:
    """The figures of a shape: seconds of kernels, and of the pieces that found one of them."""

    rows: int
    inputs: int
    outputs: int
    measured_rows: int  # in idle time
    guess: float
    idle: float
    tuned: float
    has_same_bits: bool
    search_s: float
    num_pieces: int
    longest_ms: float
    longest_of_tuned_ms: float  # with pieces whose kernels were loaded before
    finer: float
    own: float  # 0: none takes it
    kernel: str  # that takes it

    @property
    def taken(self) -> float:
        """Seconds of what an engine takes after idle times, without tuning."""
        return self.own or self.idle

    @property
    def best(self) -> float:
        """Seconds of the fastest that is there."""
        return min(self.tuned, self.own or self.tuned)


def drawn(seed: int, count: int) -> list[tuple[int, int, int]]:
    """Draw rows, inputs and outputs."""
    rng = random.Random(seed)

    def even(low: int, high: int, step: int) -> int:
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
        return min(high, max(low, round(value / step) * step))

    return [(even(*ROWS, 1), even(*WIDTHS, STEP), even(*WIDTHS, STEP)) for _ in range(count)]


def kept_rows(rows: int) -> int:
    """Return the number of rows whose choice is taken for so many."""
    return min(count for count in covering_rows(ROWS[1]) if count >= rows)


def finer_rows(rows: int) -> int:
    """Return the number of rows whose choice would be taken with twice as many measured."""
    above = kept_rows(rows)
    below = max((count for count in covering_rows(ROWS[1]) if count < above), default=0)
    middle = (above + below) // 2
    return middle if rows <= middle else above


def run(pieces: trials.Pieces, pause_s: float) -> tuple[trials.Found, list[float]]:
    """Run a search; return what it found and the seconds of its pieces."""
    times: list[float] = []
    while True:
        begin = time.perf_counter()
        try:
            next(pieces)
        except StopIteration as end:
            found: trials.Found = end.value
            return found, times
        finally:
            times.append(time.perf_counter() - begin)
        time.sleep(pause_s)


def own_launch(operands: trials.Operands, x: torch.Tensor) -> tuple[str, Callable[[int], None]]:
    """Return the kernel that the engine takes by itself, and what launches it so often."""
    matrices = [Matrix(weight) for weight in operands.weights]

    def launch(count: int) -> None:
        for index in range(count):
            linear(x, matrices[index % len(matrices)])

    return route_of(x, matrices[0]).gemm.name, launch


def compared(
    operands: trials.Operands, rows: int, algorithms: list[Algorithm]
) -> tuple[list[float], bool, str]:
    """Return median seconds of each at so many rows, in turns, and whether all bits are equal.

    Of a kernel of our own, if one takes the GEMM, the seconds come last; its name is returned.
    """
    problem = Problem(operands.shape(rows), torch.cuda.current_device())
    x, before = operands.x(rows), operands.out(rows)
    outs = []
    launches: list[Callable[[int], None]] = []
    graphs = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # rows are made there
    with torch.cuda.stream(stream):
        for algorithm in algorithms:
            plan, out = MatmulPlan(problem, algorithm), before.clone()
            launch = partial(launched, plan, operands, x, out, stream)
            launch(1)
            outs.append(out.clone())
            launches.append(launch)
        kernel, own = own_launch(operands, x)
        launches += [own] * (kernel != "cublaslt")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for each in launches:
            each(1)
            begin.record()
            each(4)
            end.record()
            end.synchronize()
            count = math.ceil(ROUND_S / max(begin.elapsed_time(end) * 1e-3 / 4, 1e-6))
            graphs.append((captured(partial(each, count)), count))
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(ROUNDS):
            for (graph, count), taken in zip(graphs, times, strict=True):
                graph.replay()
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) * 1e-3 / count)
        bits = [out.view(torch.int16) for out in outs]
        is_same = all(torch.equal(bits[0], each) for each in bits[1:])
    return [median(taken) for taken in times], is_same, kernel


def launched(
    plan: MatmulPlan,
    operands: trials.Operands,
    x: torch.Tensor,
    out: torch.Tensor,
    stream: torch.cuda.Stream,
    count: int,
) -> None:
    """Launch a plan so often, over all matrices."""
    for index in range(count):
        weight = operands.weights[index % len(operands.weights)]
        plan.launch(x.data_ptr(), weight.data_ptr(), out.data_ptr(), stream.cuda_stream)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture what is launched on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        work()
    finally:
        graph.capture_end()
    return graph


def lines(shapes: list[tuple[int, int, int]], seconds: float) -> Iterator[Line]:
    """Measure shapes, as many as the time allows."""
    begin = time.perf_counter()
    for rows, inputs, outputs in shapes:
        if time.perf_counter() - begin > seconds:
            return
        operands = trials.Operands.random(inputs, outputs, torch.bfloat16)
        measured = kept_rows(rows)
        idle, pieces = run(search.searched(operands, measured), PAUSE_S)
        tuned, again = run(search.searched(operands, rows), 0.0)
        problem = Problem(operands.shape(rows), torch.cuda.current_device())
        guess = cublaslt.default(problem)
        taken = problem.algorithm_of(idle.algorithm.blob) or guess
        finer, _ = run(search.searched(operands, finer_rows(rows)), 0.0)
        near = problem.algorithm_of(finer.algorithm.blob) or guess
        kernels = [guess, taken, tuned.algorithm, near]
        times, is_same, kernel = compared(operands, rows, kernels)
        own = times[4] if len(times) > len(kernels) else 0.0
        yield Line(
            *(rows, inputs, outputs, measured, *times[:3], is_same),
            *(sum(pieces), len(pieces), 1e3 * max(pieces), 1e3 * max(again)),
            *(times[3], own, kernel),
        )


def summed_up(name: str, ratios: list[float]) -> None:
    """Print how far kernels are from the best."""
    share = sum(ratio <= WITHIN for ratio in ratios) / len(ratios)
    print(
        f"{name:5}: {geometric_mean(ratios):.3f} of the best on average, {max(ratios):.3f} at "
        f"most; {share:.0%} of {len(ratios)} shapes within {WITHIN - 1:.0%}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu()
    print(f"{torch.cuda.get_device_name()}, microseconds; ratios to what tune finds")
    print(" rows inputs outputs  measured    guess     idle    tuned  guess   idle  finer", end="")
    print("  longest piece")
    machine = tuning.Machine.of(torch.cuda.current_device())
    found: list[Line] = []
    for line in lines(drawn(options.seed, options.shapes), options.seconds):
        found.append(line)
        figures = "".join(f"{1e6 * each:9.2f}" for each in (line.guess, line.idle, line.tuned))
        parts = (line.guess, line.idle, line.finer)
        ratios = "".join(f"{each / line.tuned:7.3f}" for each in parts)
        own = f"  {line.kernel} {1e6 * line.own:.2f}" if line.own else ""
        print(
            f"{line.rows:5} {line.inputs:6} {line.outputs:7} {line.measured_rows:9}{figures}"
            f"{ratios} {line.longest_ms:8.2f} ms{own}"
            f"{'' if line.has_same_bits else '  OTHER BITS'}",
            flush=True,
        )
        if options.json:
            said = {"machine": str(machine), "lines": [asdict(line) for line in found]}
            options.json.write_text(json.dumps(said, indent=1) + "\n")
    if not found:
        raise SystemExit("no shape was measured in this time")
    for name in ("guess", "idle", "finer"):
        summed_up(name, [getattr(line, name) / line.tuned for line in found])
    summed_up("taken", [line.taken / line.best for line in found])
    print(
        f"longest piece {max(line.longest_ms for line in found):.2f} ms, with kernels that were "
        f"loaded before {max(line.longest_of_tuned_ms for line in found):.2f} ms; "
        f"{sum(line.search_s for line in found) / len(found):.2f} s of idle time a shape"
    )


if __name__ == "__main__":
    main()
