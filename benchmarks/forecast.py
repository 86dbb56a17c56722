"""What steps take on several GPUs of one host, forecast: `python benchmarks/forecast.py`.

Nothing here was measured on several GPUs. A step is one GPU's (`step_times.py`) over the ranks, and
what they exchange (`replicas.py`). With stages, as many parts of the batch are in flight: a token
waits for the pass of its own part. Prints the table of docs/cluster.md.
"""

import sys
from collections.abc import Iterator

from replicas import RankTimes
from step_times import SIZES, times_of

MODELS = (("8b", False), ("70b", True), ("70b", False))
SPLITS = ((4, 1), (8, 1), (2, 2), (1, 4))  # ranks of tensors, stages
BATCHES = (1, 32, 128)
CONTEXT = 256
PROMPT = 2048


def step_ms(shape: str, is_fp8: bool, tensor: int, pipeline: int, batch: int) -> float:
    """Return the time between two tokens of a sequence, `batch` of which are decoded."""
    times = rank_times(shape, is_fp8, tensor, pipeline)
    rows = max(1, batch // pipeline)
    return times.step_ms(rows, rows * CONTEXT, [])


def rank_times(shape: str, is_fp8: bool, tensor: int, pipeline: int) -> RankTimes:
    """Return the times of an H100's steps over ranks and stages."""
    config = SIZES[shape]
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return RankTimes(times_of(shape, is_fp8=is_fp8), tensor, pipeline, layers, hidden)


def rows() -> Iterator[str]:
    """Make the lines of the table."""
    yield f"| model | GPUs | {' | '.join(f'batch {n}' for n in BATCHES)} | a prompt of {PROMPT:,} |"
    yield "|" + "---|" * (3 + len(BATCHES))
    for shape, is_fp8 in MODELS:
        for tensor, pipeline in SPLITS:
            split = f"{tensor * pipeline}: tensor {tensor}" + f", pipeline {pipeline}" * (
                pipeline > 1
            )
            steps = [step_ms(shape, is_fp8, tensor, pipeline, batch) for batch in BATCHES]
            prompt = rank_times(shape, is_fp8, tensor, pipeline).step_ms(0, 0, [(0, PROMPT)])
            cells = " | ".join(f"{ms:.2f} ms" for ms in steps)
            name = f"{shape.upper()} {'fp8' if is_fp8 else 'bf16'}"
            yield f"| {name} | {split} | {cells} | {prompt:.0f} ms |"


def main() -> int:
    """Print the table."""
    print("\n".join(rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
