"""Graphs of steps on several ranks: all take the same decisions, and give one rank's tokens.

Without a GPU a graph is a step that is run again (`fixtures/models/repeated.py`).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import Pairs, draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import Driver, Generation, make_model, make_runner, save
from fixtures.models.ranks import Group
from fixtures.models.repeated import repeat, start_graphs
from fixtures.waiting import wait_for
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slipstream.runner.model_runner import ModelRunner
from slipstream_runtime.ranks import RankError

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
HEAD = 3  # the adapter whose terms kernels do not take: steps with it are no graphs
NUM_ADAPTERS = 4


@dataclass(frozen=True)
class Submit:
    """A request: of an adapter, -1: of none."""

    size: int
    num_outputs: int
    adapter: int


@dataclass(frozen=True)
class Leave:
    """An adapter goes, if no request has it: from the device, or for good."""

    adapter: int
    is_removed: bool


Act = Submit | Leave | int  # a step of chunks of so many tokens; odd: its logits before, too


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and its adapters."""
    folder = tmp_path_factory.mktemp("graphs")
    model = make_model("llama", intermediate_size=192, num_hidden_layers=2)
    names, generator = targets_of(model), torch.Generator().manual_seed(3)
    head = {
        "lm_head": (
            torch.randn(3, model.config.hidden_size, generator=generator) * 0.1,
            torch.randn(model.config.vocab_size, 3, generator=generator),
        )
    }
    drawn: list[tuple[int, Pairs]] = [
        (rank, draw_pairs(model, own, rank, rank, 0.1))
        for rank, own in ((1, names), (16, names[1:]), (40, names[:2]))
    ]
    made = [save(model, folder / "base")]
    for number, (rank, pairs) in enumerate([*drawn, (3, head)]):
        made.append(write_adapter(folder / str(number), pairs, rank))
    return made


@dataclass
class Script:
    """Plays acts on a runner."""

    runner: ModelRunner
    directories: list[Path]
    numbers: dict[int, int] = field(default_factory=dict)
    rows: list[Generation] = field(default_factory=list)

    def play(self, acts: list[Act]) -> list[list[int]]:
        """Return the tokens of all requests."""
        rng, driver = random.Random(7), Driver(self.runner)
        made: list[Generation] = []
        for act in acts:
            running = [row for row in self.rows if not row.is_finished]
            if isinstance(act, Submit) and len(running) < SIZES["max_num_seqs"]:
                prompt = [rng.randrange(1009) for _ in range(act.size)]
                number = self.number(act.adapter) if act.adapter >= 0 else 0
                made.append(Generation(prompt, act.num_outputs, adapter=number))
                self.rows = [*running, made[-1]]
            elif isinstance(act, Leave):
                self.leave(act, {row.adapter for row in running})
            elif isinstance(act, int) and running:
                driver.keep_logits = bool(act % 2)
                driver.step(running, act)
        driver.keep_logits = False
        while not all(row.is_finished for row in self.rows):
            driver.step([row for row in self.rows if not row.is_finished], 16)
        for adapter in range(NUM_ADAPTERS):
            self.leave(Leave(adapter, is_removed=True), set())
        return [row.outputs for row in made]

    def number(self, adapter: int) -> int:
        """Return an adapter's number, which comes back to the device if it was evicted."""
        adapters = self.runner.adapters
        if adapter not in self.numbers:
            read = adapters.read(str(self.directories[1 + adapter]))
            self.numbers[adapter] = adapters.add(read)
        number = self.numbers[adapter]
        if number not in adapters._loaded:
            adapters.start_load(number)
            adapters.settle(number)
        return number

    def leave(self, act: Leave, used: set[int]) -> None:
        number = self.numbers.get(act.adapter)
        if number is None or number in used:
            return
        if act.is_removed:
            self.runner.adapters.remove(self.numbers.pop(act.adapter))
        else:
            self.runner.adapters.evict(number)


class Ranks:
    """Ranks with graphs, between scripts."""

    def __init__(
        self, directories: list[Path], monkeypatch: pytest.MonkeyPatch, num_stages: int = 1
    ) -> None:
        self.group = Group(directories[0], 2, num_stages, **SIZES)
        wait_for(lambda: len(self.group.followers) == 2 * num_stages - 1)
        followers = sorted(self.group.followers, key=lambda each: each._joined._memory.rank)
        self.runners: list[ModelRunner] = [self.group.leader, *followers]
        self.all = repeat(self.runners, self.group.plan, monkeypatch)
        self.stages = [self.all[begin : begin + 2] for begin in range(0, len(self.all), 2)]

    def check_alike(self) -> None:
        """The ranks of a stage have taken the same decisions, in the same order."""
        for number, (one, other) in enumerate(self.stages):
            wait_for(lambda one=one, other=other: one.num_passes <= other.num_passes)
            assert one.notes == other.notes, f"stage {number}"
        for first in range(0, len(self.runners), 2):
            one, other = (each._graphs for each in self.runners[first : first + 2])
            assert one is not None
            assert other is not None
            assert list(one._graphs) == list(other._graphs)
            assert list(one._adapted) == list(other._adapted)
            assert len(one._adapted) <= len(one._buckets.shapes)
            for shape, graph in one._adapted.items():
                assert (graph is None) == (other._adapted[shape] is None)

    def restart(self) -> None:
        """Have none but the graphs of the start."""
        for each in self.all:
            each.notes.clear()
            each._num_captured = 0
        start_graphs(self.runners, self.group.plan, self.all)

    def end(self) -> None:
        self.group.end()
        assert self.group.errors == []


FIXED: list[Act] = [
    *[Submit(9, 2, -1), 16, Submit(5, 3, 0), 15, 16, Submit(17, 1, 1), 16, Leave(0, False)],
    *[Submit(5, 1, HEAD), 16, Leave(1, True), Submit(1, 2, 1), Submit(2, 2, 0), 16, 16],
]
SHORT: list[Act] = [Submit(2, 2, -1), 16, Submit(5, 2, 0), 15]
NUM_STAGES = [1, pytest.param(2, marks=pytest.mark.rest)]


@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_all_ranks_capture_and_replay_the_same_graphs(
    num_stages: int, one: ModelRunner, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = SHORT if num_stages == 1 else FIXED
    wanted = Script(one, directories).play(acts)
    ranks = Ranks(directories, monkeypatch, num_stages)
    num_plain = len(ranks.group.leader._graphs._graphs)
    found = Script(ranks.group.leader, directories).play(acts)
    assert found == wanted
    ranks.check_alike()
    for runner, repeats in zip(ranks.runners, ranks.all, strict=True):
        replays = [note[1] for note in repeats.notes if note[0] == "replay"]
        assert any(number <= num_plain for number in replays), "steps of rows without adapters"
        assert any(number > num_plain for number in replays)
        assert None not in runner._graphs._adapted.values()
    ranks.end()


SUBMITS = st.builds(
    Submit, st.integers(1, 40), st.integers(1, 3), st.integers(-1, NUM_ADAPTERS - 1)
)
LEAVES = st.builds(Leave, st.integers(0, NUM_ADAPTERS - 1), st.booleans())
ACTS = st.lists(st.one_of(SUBMITS, st.integers(1, 16), st.integers(1, 16), LEAVES), max_size=12)


@pytest.fixture(scope="module")
def one(directories: list[Path]) -> ModelRunner:
    return make_runner(directories[0], **SIZES)


@pytest.fixture(scope="module")
def ranks(directories: list[Path]) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Ranks(directories, monkeypatch)
        yield made
        made.end()


@pytest.mark.rest
@settings(max_examples=8, deadline=None)
@given(acts=ACTS, refused=st.sets(st.integers(1, 6)), refuser=st.integers(0, 1))
@example(acts=FIXED, refused={1, 3}, refuser=1)
def test_drawn_steps(
    acts: list[Act],
    refused: set[int],
    refuser: int,
    one: ModelRunner,
    ranks: Ranks,
    directories: list[Path],
) -> None:
    """Adapters come and go, and one rank has no memory for some of the graphs."""
    wanted = Script(one, directories).play(acts)
    ranks.restart()
    num_plain = len(ranks.group.leader._graphs._graphs)

    def fails(number: int) -> None:
        if number - num_plain in refused:
            raise torch.OutOfMemoryError

    ranks.all[refuser].fails = fails
    found = Script(ranks.group.leader, directories).play(acts)
    ranks.all[refuser].fails = lambda number: None
    assert found == wanted
    ranks.check_alike()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_capture_that_fails_on_one_rank_ends_all(
    rank: int, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Ranks(directories, monkeypatch)

    def fails(number: int) -> None:
        raise ValueError("planted")

    made.all[rank].fails = fails
    said = "rank 0: ValueError: planted" if rank == 0 else "rank 0: RankError: rank 1 has failed"
    with pytest.raises(RankError, match=said):
        Script(made.group.leader, directories).play([Submit(5, 2, 0), 16])
    (error,) = made.group.wait()
    assert "planted" in str(error) if rank else "rank 0 has failed" in str(error)
