"""Measures cuBLASLt's kernels for the GEMMs of a checkpoint and keeps the fastest of each.

    python -m slipstream.runner.tune [--rows N ...] < CONFIG

CONFIG is an `EngineConfig` as JSON. The GPU should have nothing else to do. Exit code 2, and one
line on stderr, where it cannot be done.
"""

import argparse
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import torch

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, StartError
from slipstream.kernels.gemm import cublaslt_groups, search, tiles, trials, tuning
from slipstream.kernels.gemm.cublaslt import DTYPES, rows_of
from slipstream.kernels.gemm.linear import choose
from slipstream.kernels.gemm.op import ALIGNED, E4M3, INT8
from slipstream.kernels.gemm.unpacked import outputs_at_once
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import Target, target_of
from slipstream.runner.graphs import row_buckets
from slipstream.runner.matrices import Weight, weights_of
from slipstream.runner.plan import Plan, resolve

_FEWEST_ROWS = 8  # fewer have kernels of their own, or are padded
_MOST_DECODES = 512  # of a step, where the plan has no more


def usual_rows(plan: Plan) -> list[int]:
    """Return rows of decode graphs, and of steps full of prompts: the budget, its half, ..."""
    graphs = row_buckets(max(_MOST_DECODES, plan.max_num_seqs))
    # A kernel that was measured is taken for a few rows fewer, too.
    rows = {
        rows
        for rows in graphs
        if _FEWEST_ROWS <= rows <= 128 or rows % (32 if rows <= _MOST_DECODES else 64) == 0
    }
    budget = plan.max_num_batched_tokens
    while budget > _MOST_DECODES:
        rows.add(budget)
        budget //= 2
    return sorted(rows)


def tune(plan: Plan, rows: list[int]) -> None:
    """Search for every matrix and number of rows, print as it goes, and keep what is found."""
    begin, wanted, target = time.perf_counter(), _matrices(plan), target_of(plan.device)
    machine = tuning.Machine.of(torch.cuda.current_device())
    print(f"{machine.gpu}, cuBLASLt {machine.cublaslt}; times in microseconds")
    print(f"{'':8} rows     default       tuned   gain   TB/s  TFLOP/s  kernel")
    totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    num_measured: Counter[int] = Counter()
    for matrix in wanted:
        choices = []
        if matrix.packing is not None:
            wide = "e4m3" if matrix.packing.takes_e4m3 else "16 bits again"
            wide += " or 16 bits again" if matrix.packing.can_round_rows else ""
            print(f"{matrix.name:8} {matrix.kind}: tuned where it is put into {wide}")
        for choice in _tune(matrix, rows, target):
            print(_line(matrix, choice), flush=True)
            choices.append(choice)
            totals[choice.rows][0] += matrix.count * choice.default_microseconds
            totals[choice.rows][1] += matrix.count * choice.microseconds
            num_measured[choice.rows] += 1
        tuning.save(machine, choices)
    for num_rows, (default, tuned) in totals.items():
        if num_measured[num_rows] < len(wanted):
            continue  # the others run by kernels of our own
        print(
            f"{'step':8} {num_rows:4}  {default:10.1f}  {tuned:10.1f}  {1 - tuned / default:5.1%}"
        )
    print(f"{tuning.path(machine)}: written in {time.perf_counter() - begin:.1f} s")


def _matrices(plan: Plan) -> list[Weight]:
    found = weights_of(plan.config, plan.model, plan.dtype, target_of(plan.device))
    return [weight for weight in found if weight.outputs]


def adds_in_product(matrix: Weight) -> bool:
    """Whether cuBLASLt adds the bias or residual; a product of 8 bits is scaled first."""
    return matrix.adds and matrix.dense_dtype == matrix.model_dtype


def _keeps_packed(matrix: Weight, rows: int, target: Target) -> bool:
    """Whether weights are multiplied with as they lie; else they are put into 16 bits first."""
    return choose(matrix.spec(rows, target)).gemm.name != "unpacked"


def _tune(matrix: Weight, rows: list[int], target: Target) -> Iterable[tuning.Choice]:
    """Search for numbers of rows with which cuBLASLt multiplies: packed weights in 16 bits then, or
    in e4m3.
    """
    if matrix.packing is not None and matrix.packing.takes_e4m3:
        yield from _tune_by_groups(matrix, rows, target)
        if matrix.packing.for_e4m3:  # else fewer rows stay in 16 bits
            return
    outputs = matrix.outputs
    if matrix.packing is not None:
        outputs = outputs_at_once(matrix.packing, not matrix.gate and not matrix.adds)
    sizes = (matrix.inputs, outputs)
    operands = trials.Operands.random(*sizes, matrix.dense_dtype, adds_in_product(matrix))
    for num_rows in rows:
        if matrix.packing is not None and _keeps_packed(matrix, num_rows, target):
            continue
        if runs_by_cublaslt(matrix, num_rows, target):
            yield choice_of(operands, num_rows, search.search(operands, num_rows))


def _tune_by_groups(matrix: Weight, rows: list[int], target: Target) -> Iterable[tuning.Choice]:
    sizes = (matrix.inputs, matrix.outputs)
    for num_rows in sorted({cublaslt_groups.padded(each) for each in rows}):
        if choose(matrix.spec(num_rows, target)).gemm.name != "unpacked_e4m3":
            continue
        plan = cublaslt_groups.plan_of(num_rows, *sizes, torch.cuda.current_device())
        assert plan is not None, "it was chosen"
        operands = trials.Operands.random(*sizes, E4M3)
        operands = replace(operands, x_scales=plan.shape.x_scales)
        yield choice_of(operands, num_rows, search.search(operands, num_rows))


def choice_of(operands: trials.Operands, rows: int, found: trials.Found) -> tuning.Choice:
    """Return what is kept of a search."""
    return tuning.Choice(
        product=tuning.Product.of(operands.shape(rows)),
        rows=rows,
        algorithm=found.algorithm.blob.hex(),
        kernel=tiles.describe(found.algorithm),
        microseconds=round(found.seconds * 1e6, 3),
        default_microseconds=round(found.default_seconds * 1e6, 3),
    )


def runs_by_cublaslt(matrix: Weight, rows: int, target: Target) -> bool:
    """Whether the product alone, of values as a GEMM multiplies them, is cuBLASLt's; of int8 with
    its scales, which a kernel that scales may take.
    """
    dtype = matrix.dense_dtype
    if rows < rows_of(dtype, rows):
        return False
    plain = matrix.spec(rows, target)._replace(
        x=dtype,
        weight=dtype,
        out=matrix.model_dtype if dtype == INT8 else torch.bfloat16 if dtype == E4M3 else dtype,
        norm="",
        scales="both" if dtype == INT8 else "",
        bias=False,
        gate="",
        residual=False,
        x_pitch=matrix.inputs * dtype.itemsize % ALIGNED == 0,
        packing=None,
    )
    return choose(plain).gemm.name == "cublaslt"


def _line(matrix: Weight, choice: tuning.Choice) -> str:
    seconds = choice.microseconds * 1e-6
    size = matrix.inputs * matrix.outputs
    itemsize = getattr(torch, choice.product.dtype).itemsize
    rates = f"{size * itemsize / seconds / 1e12:5.2f}"
    rates += f"  {2 * size * choice.rows / seconds / 1e12:7.1f}"
    gain = 1 - choice.microseconds / choice.default_microseconds
    return (
        f"{matrix.name:8} {choice.rows:4}  {choice.default_microseconds:10.2f}  "
        f"{choice.microseconds:10.2f}  {gain:5.1%}  {rates}  {choice.kernel}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="slipstream.runner.tune", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        plan = resolve(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
        if plan.device.type != "cuda":
            raise ConfigError("there is no NVIDIA GPU to tune for")
        if plan.dtype not in DTYPES:
            raise ConfigError(f"products of {plan.dtype} are not tuned")
        tune(plan, sorted(set(options.rows or usual_rows(plan))))
    except (StartError, KernelError, msgspec.DecodeError, OSError) as error:
        print(f"slipstream tune: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
