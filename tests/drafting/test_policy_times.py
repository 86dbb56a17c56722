"""What the policy brings, over times of steps that were measured on a GPU; a simulated clock."""

from collections import deque
from itertools import pairwise
from random import Random
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

import pytest
from slipstream.core.drafts import Proposal, together
from slipstream.drafting.speculator import Speculator
from slipstream_contract.sampling import SamplingParams

# Rows and ms of a step: up to 64 rows measured, an 8B model on an H200; beyond, assumed.
_TIMES = [(1, 3.5), (8, 3.8), (16, 3.8), (32, 4.0), (64, 4.4), (128, 5.4), (256, 7.4)]
_HOST_MS = 0.7  # assumed: between two steps of which the second is not launched ahead


def step_ms(num_rows: int) -> float:
    for (few, low), (many, high) in pairwise(_TIMES):
        if num_rows <= many:
            return low + (high - low) * (num_rows - few) / (many - few)
    raise AssertionError(num_rows)


class Drafts:
    """Drafts of token 1, which is right with a probability that is known to the simulation."""

    def propose(self, sequence: Any, k: int) -> Proposal:
        return Proposal([1] * k, "drafts")

    def release(self, sequence: Any) -> None:
        pass


class Simulation:
    """Sequences whose every next token is 1 with probability `right`, one step ahead."""

    def __init__(self, num: int, right: float, seed: int) -> None:
        self.random, self.right, self.now = Random(seed), right, 0.0
        message = SimpleNamespace(is_probe=False)
        self.running = [
            SimpleNamespace(
                id=number,
                num_known=9,
                num_prompt=8,
                outputs=[0],
                num_pending=0,
                is_speculating=False,
                has_virtual=False,
                sampling=SamplingParams(max_tokens=999),
                request=SimpleNamespace(message=message),
                draft=None,
            )
            for number in range(num)
        ]
        self.speculator = Speculator(Drafts(), 8, clock=lambda: int(self.now * 1e6))
        self.launched: deque[tuple[list[tuple[Any, int]], float]] = deque()
        self.num_tokens = 0

    def launch(self) -> None:
        running = cast(Any, self.running)
        free = [s for s in running if not (s.is_speculating and s.num_pending)]
        decodes = together(free, running)
        if not decodes:
            return
        room = 256 - len(decodes)
        drafts = {s.id: len(found) for s, found in self.speculator.propose(decodes, room)}
        step = [(cast(Any, s), drafts.get(s.id, 0)) for s in decodes]
        for sequence, _ in step:
            sequence.num_pending += 1
        self.launched.append((step, self.now))

    def commit(self) -> None:
        step, _ = self.launched.popleft()
        num_drafts = sum(count for _, count in step)
        took = step_ms(len(step) + num_drafts) * self.random.uniform(0.95, 1.1)
        is_alone = not self.launched
        self.now += took + (_HOST_MS if is_alone else 0.0)
        rows = [None] * (len(step) + num_drafts)
        batch = SimpleNamespace(num_decodes=len(rows), rows=rows, num_drafts=num_drafts)
        self.speculator.step_took(cast(Any, batch), int(took * 1e6))
        for sequence, count in step:
            sequence.num_pending -= 1
            tokens = [int(self.random.random() < self.right) for _ in range(count + 1)]
            wrong = tokens[:count].index(0) if 0 in tokens[:count] else count
            sequence.outputs += tokens[: wrong + 1]
            sequence.num_known += wrong + 1
            self.num_tokens += wrong + 1
            if count:
                self.speculator.verified(sequence, count, wrong, int(wrong < count))

    def rate(self, num_steps: int) -> float:
        """Return tokens per ms."""
        for _ in range(num_steps):
            while len(self.launched) < 2:
                before = len(self.launched)
                self.launch()
                if len(self.launched) == before:
                    break
            self.commit()
        return self.num_tokens / self.now


@pytest.mark.parametrize(
    ("right", "num", "least"),
    [(0.7, 1, 2.3), (0.7, 8, 2.0), (0.7, 32, 1.4), (0.1, 1, 0.98), (0.1, 32, 0.98), (0.3, 8, 0.98)],
)
def test_drafts_bring_what_they_can_and_cost_nothing_where_they_are_wrong(
    right: float, num: int, least: float
) -> None:
    ratios = [
        Simulation(num, right, seed).rate(250) / (num / step_ms(num) / 1.025) for seed in range(8)
    ]
    assert mean(ratios) >= least, ratios
