"""GEMMs of drawn shapes: cuBLASLt's guess, what idle time finds, and what `slipstream tune` finds.

    python benchmarks/idle_tuning.py [--shapes 20] [--seconds 100] [--seed 0] [--json FILE]

Shapes have 512 to 16,384 inputs and outputs, in steps of 64, and 1 to 2,048 rows, both drawn evenly
by their logarithm. In idle time the search is for the number of rows that is kept for the shape
(`Choices.find`), in pieces with a pause between them as a loop makes; `slipstream tune` is the same
search at the very rows, at once. Then the three kernels run in turns. Nothing is kept on disk.
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
from slipstream.runner.idle_tuning import covering_rows

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


def compared(
    operands: trials.Operands, rows: int, algorithms: list[Algorithm]
) -> tuple[list[float], bool]:
    """Return median seconds of each at so many rows, in turns, and whether all bits are equal."""
    problem = Problem(operands.shape(rows), torch.cuda.current_device())
    x, before = operands.x(rows), operands.out(rows)
    outs = []
    graphs = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # rows are made there
    with torch.cuda.stream(stream):
        for algorithm in algorithms:
            plan, out = MatmulPlan(problem, algorithm), before.clone()
            launch = partial(launched, plan, operands, x, out, stream)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            launch(1)
            outs.append(out.clone())
            begin.record()
            launch(4)
            end.record()
            end.synchronize()
            count = math.ceil(ROUND_S / max(begin.elapsed_time(end) * 1e-3 / 4, 1e-6))
            graphs.append((captured(partial(launch, count)), count))
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
    return [median(taken) for taken in times], is_same


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
        times, is_same = compared(operands, rows, [guess, taken, tuned.algorithm])
        yield Line(
            *(rows, inputs, outputs, measured, *times, is_same),
            *(sum(pieces), len(pieces), 1e3 * max(pieces), 1e3 * max(again)),
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, microseconds; ratios to what tune finds")
    print(" rows inputs outputs  measured    guess     idle    tuned  guess   idle  longest piece")
    found: list[Line] = []
    for line in lines(drawn(options.seed, options.shapes), options.seconds):
        found.append(line)
        figures = "".join(f"{1e6 * each:9.2f}" for each in (line.guess, line.idle, line.tuned))
        ratios = f"{line.guess / line.tuned:7.3f}{line.idle / line.tuned:7.3f}"
        print(
            f"{line.rows:5} {line.inputs:6} {line.outputs:7} {line.measured_rows:9}{figures}"
            f"{ratios} {line.longest_ms:8.2f} ms{'' if line.has_same_bits else '  OTHER BITS'}",
            flush=True,
        )
    if not found:
        raise SystemExit("no shape was measured in this time")
    for name in ("guess", "idle"):
        ratios_of = [getattr(line, name) / line.tuned for line in found]
        share = sum(ratio <= WITHIN for ratio in ratios_of) / len(found)
        print(
            f"{name:5}: {geometric_mean(ratios_of):.3f} of tuned on average, {max(ratios_of):.3f} "
            f"at most; {share:.0%} of {len(found)} shapes within {WITHIN - 1:.0%}"
        )
    print(
        f"longest piece {max(line.longest_ms for line in found):.2f} ms, with kernels that were "
        f"loaded before {max(line.longest_of_tuned_ms for line in found):.2f} ms; "
        f"{sum(line.search_s for line in found) / len(found):.2f} s of idle time a shape"
    )
    if options.json:
        machine = tuning.Machine.of(torch.cuda.current_device())
        said = {"machine": str(machine), "lines": [asdict(line) for line in found]}
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
