"""Chunks of long prompts beside decodes on a device that computes whole graphs and tiles."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.step_sizes import StepSizes
from slipstream.engine.prefill_budget import PrefillBudget
from slipstream.runner.graphs import Buckets

MS = 1_000_000
SIZES = Buckets(256, 2048).sizes


@dataclass
class Device:
    """A device that reads weights for as long as `free` rows take, and computes idle rows, too.

    Args:
        base: ms of decodes alone.
        free: rows that take no longer than decodes alone.
        row: ms of each further one.
        grows: share by which a chunk's tokens cost more at the prompt's end.
    """

    base: float
    free: int
    row: float
    grows: float = 0.0
    length: int = 16_384

    def __post_init__(self) -> None:
        self.now_ms = 0.0
        doubles_at = int(self.length / self.grows) if self.grows else 0
        self.budget = PrefillBudget(lambda: int(self.now_ms * MS), doubles_at, sizes=SIZES)

    def took(self, num_decodes: int, num_tokens: int, start: int = 0) -> float:
        """Return the ms of a step."""
        if not num_tokens:
            return self.base
        rows = num_decodes + SIZES.filled(num_decodes, num_tokens)
        late = self.row * num_tokens * self.grows * start / self.length
        return self.base + self.row * max(0, rows - self.free) + late

    def run(self, num_decodes: int, num_tokens: int, start: int = 0) -> float:
        """Run a step, and return its ms."""
        self.budget.start_step(num_decodes, num_tokens)
        took = self.took(num_decodes, num_tokens, start)
        self.now_ms += took
        self.budget.finish_step()
        return took

    def prompt(self, num_decodes: int) -> list[tuple[int, float]]:
        """Run a long prompt; return tokens and ms of each step with any."""
        for _ in range(7):
            self.run(0, 1024)
            self.run(num_decodes, 0)
        steps, start = [], 0
        while start < self.length:
            num_tokens = self.budget.take(num_decodes, 1, start)
            steps.append((num_tokens, self.run(num_decodes, num_tokens, start)))
            start += num_tokens
        return [step for step in steps if step[0]]


@st.composite
def devices(draw: st.DrawFn) -> tuple[int, Device]:
    """Draw a device, and decodes whose time computes more rows than lie between two graphs."""
    num_decodes, base = draw(st.integers(1, 256)), draw(st.floats(0.5, 20.0))
    rows = draw(st.floats(128.0 if num_decodes <= 128 else 256.0, 500.0))
    free = draw(st.integers(num_decodes, int(rows)))  # reading weights hides no more
    return num_decodes, Device(base, free, base / rows, draw(st.sampled_from([0.0, 0.5])))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(devices())
def test_a_step_with_a_long_prompt_takes_less_than_twice_the_decodes(drawn):
    """And the prompt at most twice as many steps as by the cost of its tokens in large ones."""
    num_decodes, device = drawn
    sizes, times = zip(*device.prompt(num_decodes), strict=True)
    assert max(times) < 2 * device.base
    most = (device.row + device.base / 1024) * (1 + device.grows)
    assert min(sizes[:-1]) >= int(0.75 * device.base / (2 * most)) // 4 * 4


GRAPHS = StepSizes(((0, (512,)), (8, (56, 504)), (32, (480,))))


def slow(sizes: StepSizes = GRAPHS, launch_ms: int = 11) -> tuple[PrefillBudget, list[int]]:
    """Return a budget whose host launches slowly, and its time: decodes take 2 ms, tokens 10 us."""
    now = [0]
    budget = PrefillBudget(lambda: now[0], sizes=sizes)
    launch(budget, now, 4, 0, 2)
    for _ in range(7):
        launch(budget, now, 0, 1000, 10, launch_ms)
    return budget, now


def launch(
    budget: PrefillBudget, now: list[int], decodes: int, tokens: int, took: float, ms: int = 0
) -> None:
    """Run a step that takes `took` ms and whose launch takes `ms`."""
    budget.start_step(decodes, tokens)
    budget.launch_took(ms * MS)
    now[0] += int(took * MS)
    budget.finish_step()


def test_a_slow_host_leaves_the_graph_of_so_many_decodes_its_room():
    """And none to the others: beside decodes that have no graph with prompts no step is bounded."""
    budget, _ = slow()
    assert [budget.room(n) for n in (1, 8, 9, 32, 33)] == [504, 504, 480, 480, 800]


def test_long_prompts_get_a_graph_if_a_launch_takes_longer_than_their_step_may():
    """A step of four long prompts may take 8 ms, less than the target of 10, and 600 tokens."""
    budget, _ = slow(launch_ms=9)
    assert budget.room(4) == 800
    budget.take(4, 4)  # measures decodes
    assert budget.take(4, 4) == 504
    assert budget.take(40, 4) == 592


@pytest.mark.parametrize("tokens", [0, 40])
def test_a_bounded_host_is_measured_again_by_the_next_launch_that_is_no_graph(tokens):
    """However many steps it takes until there are so many tokens."""
    budget, now = slow()
    for _ in range(128):
        assert budget.room(4) == 504
        launch(budget, now, 4, tokens, 2 + tokens / 100)
    for _ in range(5):
        assert budget.room(4) > 504
        launch(budget, now, 4, tokens, 2 + tokens / 100)
    launch(budget, now, 4, 700, 9, 11)
    assert budget.room(4) == 504
    launch(budget, now, 4, 700, 9, 3)
    assert budget.room(4) > 504


def test_rows_that_were_idle_beside_a_chunk_count_for_their_cost():
    """A short prompt made the step of 56 tokens one of 60, in the graph of 504."""
    budget, now = slow()
    budget.take(4, 1)  # measures decodes
    for _ in range(3):
        budget.take(4, 1)
        launch(budget, now, 4, 60, 3)
    assert budget.take(4, 1) == 504
