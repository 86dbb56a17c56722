"""Our engine on the rows of the GPU table, one precision a process; called by `step.py`."""

import argparse
import sys
import time
from pathlib import Path

import ceilings
import cupy
import torch
from engine import EngineTarget, build
from rows import BUDGET, ROWS, SHAPE
from side import Side, measure_pareto, measure_rows, wanted


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], choices=ROWS)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=BUDGET)
    args = parser.parse_args()
    side = Side(args.output, "slipstream")
    rows = wanted(args.rows, lambda row: row.is_fp8 == args.fp8)
    if "ceilings" not in side.data["about"]:
        side.about(ceilings=ceilings.measure(), gpu=torch.cuda.get_device_name())
    options = {"quantization": "fp8"} if args.fp8 else {}
    began = time.perf_counter()
    engine = build(args.shape, "auto", args.max_num_batched_tokens, **options)
    print(f"engine built in {time.perf_counter() - began:.1f} s", flush=True)
    side.about(
        versions=f"torch {torch.__version__}, CuPy {cupy.__version__}",
        max_num_batched_tokens=args.max_num_batched_tokens,
        repetitions=args.repeat,
    )
    target = EngineTarget(engine)
    measure_rows(side, target, rows, args.repeat)
    if ROWS["decode-bs1"] in rows:
        measure_pareto(side, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
