"""What a long prompt costs those who stream: `python benchmarks/long_prompt.py [--shape S]`.

STREAMS requests decode; then a prompt of PROMPT tokens comes, `--repeat` times. Prints p50, p99 and
maximum of the times between tokens, without and beside it, and how long the prompt took to its
first token; the last line is JSON. The promise is that the p99 at most doubles: the exit code is 1
where the median of its ratios is above `--goal`.
"""

import argparse
import json
import statistics
import time

import numpy as np
from open_load import OpenTarget, OursTarget
from report import commit
from shapes import SHAPES


class Streams:
    """Streams of an engine, and the times between their tokens."""

    def __init__(self, target: OpenTarget, vocab_size: int) -> None:
        self._target = target
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(11)
        self._last: dict[int, float] = {}  # of a stream, by perf_counter; 0: not begun
        self._num_submitted = 0

    def begin(self, count: int, num_input: int, num_output: int) -> None:
        """Begin so many streams, and step until each has a token."""
        for _ in range(count):
            self._last[self._submit(num_input, num_output)] = 0.0
        while not all(self._last.values()):
            self.step()

    def _submit(self, num_input: int, num_output: int) -> int:
        prompt = self._rng.integers(0, self._vocab_size, num_input).tolist()
        self._target.submit(self._num_submitted, prompt, num_output)
        self._num_submitted += 1
        return self._num_submitted - 1

    def step(self) -> tuple[list[float], set[int]]:
        """Return ms between tokens of the streams in a step, and which requests got tokens."""
        gaps, served = [], set()
        for number, _ in self._target.advance(float("inf")):
            served.add(number)
            if number in self._last:
                now = time.perf_counter()
                gaps.append((now - self._last[number]) * 1e3)
                self._last[number] = now
        return gaps, served

    def alone(self, num_steps: int) -> list[float]:
        """Return ms between tokens of so many steps."""
        return [gap for _ in range(num_steps) for gap in self.step()[0]]

    def beside(self, num_input: int) -> tuple[list[float], float]:
        """Return ms between tokens while a prompt is computed, and the seconds that it took."""
        gaps, began = [], time.perf_counter()
        number = self._submit(num_input, 1)
        while True:
            more, served = self.step()
            gaps += more
            if number in served:
                return gaps, time.perf_counter() - began


def figures(gaps: list[float]) -> dict[str, float]:
    """Return p50, p99 and maximum in ms."""
    p50, p99, most = np.percentile(gaps, (50, 99, 100)).tolist()
    return {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(most, 3)}


def measure(target: OpenTarget, args: argparse.Namespace) -> dict[str, object]:
    """Return the figures of all repetitions."""
    streams = Streams(target, SHAPES[args.shape]["vocab_size"])
    streams.begin(args.streams, args.stream_tokens, args.output_tokens)
    streams.beside(args.prompt)  # as much is not measured yet
    rows = []
    for _ in range(args.repeat):
        usual = figures(streams.alone(args.steps))
        gaps, took_s = streams.beside(args.prompt)
        beside = figures(gaps)
        ratio = round(beside["p99"] / usual["p99"], 3)
        rows.append(
            {"usual_ms": usual, "beside_ms": beside, "p99_ratio": ratio, "prompt_s": took_s}
        )
        print(rows[-1], flush=True)
    median = statistics.median(row["p99_ratio"] for row in rows)
    facts = {"shape": args.shape, "streams": args.streams, "prompt": args.prompt}
    return {**facts, "commit": commit(), "p99_ratio": median, "rows": rows}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-tokens", type=int, default=500, help="of a stream's prompt")
    parser.add_argument("--output-tokens", type=int, default=8000, help="of a stream, at most")
    parser.add_argument("--prompt", type=int, default=32_766, help="tokens of the long prompt")
    parser.add_argument("--steps", type=int, default=200, help="that are measured without it")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--goal", type=float, default=2.0)
    args = parser.parse_args()
    result = measure(OursTarget(args.shape, args.max_num_batched_tokens), args)
    print(json.dumps(result))
    return int(result["p99_ratio"] > args.goal)


if __name__ == "__main__":
    raise SystemExit(main())
