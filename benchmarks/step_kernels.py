"""Kernels of a decode step, by torch's profiler: `python benchmarks/step_kernels.py [--rows 1]`.

Random weights. Of each kernel the launches and microseconds of a step, and one stretch of a step in
order: when a kernel begins, and how long it takes. Kernels that start before the one in front of
them has ended wait in it, so their times overlap and add up to more than the step.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from typing import Any

import driving
import workloads
from engine import EngineTarget, build
from shapes import SHAPES
from timing import need_gpu
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_TOKENS = 33
_SHOWN = 24  # kernels
_IN_ORDER = 40  # launches


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--quantization", default="none", help="none, fp8, int8, int4, w4a8, w8a8")
    args = parser.parse_args()
    need_gpu()
    options = {"quantization": args.quantization, "max_num_seqs": max(args.rows, 8)}
    target = EngineTarget(build(args.shape, "bfloat16", 4096, **options))
    size = SHAPES[args.shape]["vocab_size"]
    load = workloads.decode(args.rows, max_tokens=_TOKENS)
    prompts = [[token % size for token in prompt] for prompt in load.prompts]
    load = replace(load, prompts=prompts)
    for _ in range(2):
        driving.run(target, load)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        itl_ms = driving.run(target, load).itl_ms
    assert itl_ms is not None, "several tokens were made"
    events = [each for each in profiler.events() or [] if each.device_type == DeviceType.CUDA]
    show(sorted(events, key=lambda each: each.time_range.start), itl_ms)


def show(events: list[Any], itl_ms: float) -> None:
    """Print what the decodes behind the prompt consist of."""
    decodes = events[len(events) // 3 :]
    span_us = decodes[-1].time_range.end - decodes[0].time_range.start
    steps = span_us / 1e3 / itl_ms
    times = defaultdict[str, list[float]](list)
    for each in decodes:
        times[each.name].append(each.time_range.elapsed_us())
    print(f"{itl_ms:.3f} ms between tokens with the profiler; a step:")
    for name, found in sorted(times.items(), key=lambda pair: -sum(pair[1]))[:_SHOWN]:
        counts = f"{sum(found) / steps:9.1f} us {len(found) / steps:7.1f} launches"
        print(f"{counts} {sum(found) / len(found):8.2f} us each  {name[:100]}")
    middle = decodes[len(decodes) // 2 :][:_IN_ORDER]
    print("in order: begins, takes")
    for each in middle:
        begin_us = each.time_range.start - middle[0].time_range.start
        print(f"{begin_us:9.1f} {each.time_range.elapsed_us():7.2f} us  {each.name[:70]}")


if __name__ == "__main__":
    main()
