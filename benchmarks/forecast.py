"""What steps take on several GPUs of one host, forecast: `python benchmarks/forecast.py`.

Nothing here was measured on several GPUs. A step is one GPU's (`step_times.py`) over the ranks, and
what they exchange (`replicas.py`). With stages, as many parts of the batch are in flight: a token
waits for the pass of its own part. Prints the table of docs/cluster.md; `--card H100`: another's.
"""

import argparse
import sys
from collections.abc import Iterator

from limits import CARDS
from replicas import RankTimes
from step_times import SIZES, times_of

MODELS = (("8b", False), ("70b", True), ("70b", False))
SPLITS = ((2, 1), (4, 1), (8, 1), (2, 2), (1, 4))  # ranks of tensors, stages
BATCHES = (1, 32, 128)
CONTEXT = 256
PROMPT = 2048
CARD = "H200"


def step_ms(
    shape: str, is_fp8: bool, tensor: int, pipeline: int, batch: int, card: str = CARD
) -> float:
    """Return the time between two tokens of a sequence, `batch` of which are decoded."""
    times = rank_times(shape, is_fp8, tensor, pipeline, card)
    rows = max(1, batch // pipeline)
    return times.step_ms(rows, rows * CONTEXT, [])


def rank_times(shape: str, is_fp8: bool, tensor: int, pipeline: int, card: str = CARD) -> RankTimes:
    """Return the times of a card's steps over ranks and stages."""
    config = SIZES[shape]
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return RankTimes(times_of(shape, card, is_fp8=is_fp8), tensor, pipeline, layers, hidden)


def rows(card: str) -> Iterator[str]:
    """Make the lines of the tables: times, then how much faster four ranks are than two."""
    yield f"| model | GPUs | {' | '.join(f'batch {n}' for n in BATCHES)} | a prompt of {PROMPT:,} |"
    yield "|" + "---|" * (3 + len(BATCHES))
    for shape, is_fp8 in MODELS:
        name = f"{shape.upper()} {'fp8' if is_fp8 else 'bf16'}"
        for tensor, pipeline in SPLITS:
            split = f"{tensor * pipeline}: tensor {tensor}" + f", pipeline {pipeline}" * (
                pipeline > 1
            )
            steps = [step_ms(shape, is_fp8, tensor, pipeline, batch, card) for batch in BATCHES]
            prompt = prompt_ms(shape, is_fp8, tensor, pipeline, card)
            cells = " | ".join(f"{ms:.2f} ms" for ms in steps)
            yield f"| {name} | {split} | {cells} | {prompt:.0f} ms |"
    yield ""
    yield f"| 2 to 4 ranks | {' | '.join(f'batch {n}' for n in BATCHES)} | prompt |"
    yield "|" + "---|" * (2 + len(BATCHES))
    for shape, is_fp8 in MODELS:
        name = f"{shape.upper()} {'fp8' if is_fp8 else 'bf16'}"
        two, four = (
            [
                *(step_ms(shape, is_fp8, size, 1, batch, card) for batch in BATCHES),
                prompt_ms(shape, is_fp8, size, 1, card),
            ]
            for size in (2, 4)
        )
        yield f"| {name} | {' | '.join(f'{a / b:.2f}' for a, b in zip(two, four, strict=True))} |"


def prompt_ms(shape: str, is_fp8: bool, tensor: int, pipeline: int, card: str = CARD) -> float:
    """Return the time of a prompt of `PROMPT` tokens alone."""
    return rank_times(shape, is_fp8, tensor, pipeline, card).step_ms(0, 0, [(0, PROMPT)])


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", choices=CARDS, default=CARD)
    print("\n".join(rows(parser.parse_args().card)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
