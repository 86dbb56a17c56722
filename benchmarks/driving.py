"""Runs a workload on any engine and measures it by its outputs alone."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import workloads
from rows import Row
from workloads import Workload


class Target(Protocol):
    """An engine that generates greedily and ends a request only at its number of tokens."""

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a request."""

    def step(self) -> tuple[int, int]:
        """Wait for more; how many tokens came, and how many requests ended."""


@dataclass(frozen=True, slots=True)
class Run:
    """When tokens came: (seconds after the first request was offered, how many) of each step."""

    events: list[tuple[float, int]]
    seconds: float
    num_requests: int
    num_input: int

    @property
    def gaps_ms(self) -> list[float]:
        """Between steps in which every request got its one token."""
        full = self.num_requests
        return [(b[0] - a[0]) * 1e3 for a, b in pairwise(self.events) if a[1] == b[1] == full]

    @property
    def itl_ms(self) -> float | None:
        """Median time between such steps; None if there were none."""
        return statistics.median(self.gaps_ms) if self.gaps_ms else None

    @property
    def pass_ms(self) -> float:
        """Mean time between two tokens of a request, where no step gives every request one.

        So it is with stages of a pipeline, which have a share of the requests each.
        """
        made = list(accumulate(count for _, count in self.events))
        first = next(i for i, count in enumerate(made) if count >= self.num_requests)
        left = made[-1] - made[first]
        seconds = self.events[-1][0] - self.events[first][0]
        return 1e3 * seconds * self.num_requests / left if left else 0.0

    @property
    def ttft_ms(self) -> float:
        """Until the first token of any request."""
        return self.events[0][0] * 1e3

    @property
    def input_tok_s(self) -> float:
        """Prompt tokens a second, over all."""
        return self.num_input / self.seconds

    @property
    def output_tok_s(self) -> float:
        """Generated tokens a second, over all."""
        return sum(count for _, count in self.events) / self.seconds


def run(target: Target, workload: Workload) -> Run:
    """Offer everything at once, step until all is done."""
    events: list[tuple[float, int]] = []
    begin = time.perf_counter()
    for number, prompt in enumerate(workload.prompts):
        target.submit(number, prompt, workload.max_tokens)
    remaining = len(workload.prompts)
    while remaining:
        num_tokens, num_finished = target.step()
        remaining -= num_finished
        if num_tokens:
            events.append((time.perf_counter() - begin, num_tokens))
    seconds = time.perf_counter() - begin
    return Run(events, seconds, len(workload.prompts), sum(map(len, workload.prompts)))


def measure(target: Target, row: Row, repeat: int) -> Iterator[float]:
    """The row's figure `repeat` times, each as soon as it is known, after a warm-up."""
    run(target, row.warm_up())
    workload = row.workload()
    if row.runs_a_repetition < 1:
        gaps = run(target, workload).gaps_ms
        size = len(gaps) // repeat
        yield from (statistics.median(gaps[i * size : (i + 1) * size]) for i in range(repeat))
        return
    for _ in range(int(repeat * row.runs_a_repetition)):
        yield getattr(run(target, workload), row.figure)


def best_of_two(
    target: Target, batches: Sequence[int], tokens: int, prompt: int, requests: int
) -> dict[str, float]:
    """Return the better of two runs: ms a token by batch, and tokens a second of four prompts.

    Then, run once, tokens a second of so many requests, offered at the same time, with prompts of
    up to half of `prompt` tokens.
    """
    found: dict[str, float] = {}
    for batch in batches:
        runs = [run(target, workloads.decode(batch, tokens)) for _ in range(2)]
        found[f"decode_{batch}_ms"] = round(min(each.itl_ms or each.pass_ms for each in runs), 3)
    prompts = workloads.prefill(4, prompt)
    found["prompt_tok_s"] = round(max(run(target, prompts).input_tok_s for _ in range(2)))
    mixed = workloads.mixed(requests, tokens, prompt // 2)
    found[f"requests_{requests}_tok_s"] = round(run(target, mixed).output_tok_s)
    return found
