"""Requests that bring weights: read in a thread, in order, while others are served."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fixtures.engine.adapted import House
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from fixtures.engine.held import Held, Numbered
from fixtures.models.adapters import scale_of, task_arrays
from fixtures.models.checkpoints import random_prompts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slipstream.core.window import AttentionWindow
from slipstream.engine import reading
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.reading import ReadingEngine
from slipstream.engine.scheduler import Limits
from slipstream.errors import CheckpointError
from slipstream.wire import FinishReason, Submit
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.ids import pack
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable
from slipstream_contract.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
BAD = 255


class Threads:
    """An executor whose work is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: work(*given)))
        return future

    def run(self) -> None:
        """Do the oldest work."""
        future, work = self.waiting.popleft()
        try:
            future.set_result(work())
        except CheckpointError as error:
            future.set_exception(error)


class Reader(Held):
    """Adapters that are numbers, of tasks and tables too."""

    def read_task(self, task: LoraTask) -> Numbered:
        if task.weights[0] == BAD:
            raise CheckpointError("lora_config[0] is wrong")
        return Numbered(task.weights[0])

    def read_table(self, table: PromptTable) -> Numbered:
        return Numbered(table.rows[0])

    def check(self, sequence_id: int, number: int) -> None:
        assert number in self.loaded or not number


class Machine(RuleBasedStateMachine):
    """Each request ends once, and has the weights that its number had when it was sent."""

    @initialize()
    def begin(self) -> None:
        self.runner = CountingRunner(64, 4, 32, 1, AttentionWindow())
        self.held = self.runner.held = Reader()
        self.store = AdapterStore(self.held)
        self.engine = ReadingEngine(Limits(8, 64), self.runner, Words(), adapters=self.store)
        self.threads = self.engine._threads = Threads()  # type: ignore[assignment]
        self.number = 0
        self.contents: dict[int, int] = {}  # that requests must have; 0: they are refused
        self.tasks: dict[int, int] = {}  # content of each number, as clients know it
        self.cancelled: set[int] = set()
        self.ended: set[int] = set()

    def send(self, task: LoraTask | None, content: int) -> None:
        self.number += 1
        self.contents[self.number] = content
        message = Submit(self.number, pack([1, 2, 3]), GREEDY, 1, task=task)
        if content or (task is not None and task.num_rows):
            self.engine.submit(b"bridge", message)
            return
        try:
            self.engine.submit(b"bridge", message)  # behind one that is refused later, if not here
        except ContractError:
            self.ended.add(self.number)

    @rule(number=st.integers(1, 3), content=st.sampled_from([1, 2, 3, BAD]))
    def with_weights(self, number: int, content: int) -> None:
        task = LoraTask(number, 1, 1, bytes([content, 0]), bytes(12))
        if content != BAD:
            self.tasks[number] = content
        self.send(task, 0 if content == BAD else content)

    @rule(number=st.integers(1, 3))
    def by_number(self, number: int) -> None:
        self.send(LoraTask(number), self.tasks.get(number, 0))

    @rule()
    def without(self) -> None:
        self.send(None, -1)

    @precondition(lambda self: self.threads.waiting)
    @rule()
    def read(self) -> None:
        self.threads.run()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.engine.has_work:
                self.take(self.engine.step())

    def take(self, outputs: dict[bytes, list[Any]]) -> None:
        for tokens in outputs.get(b"bridge", ()):
            if tokens.finished is not None:
                assert tokens.request not in self.ended
                self.ended.add(tokens.request)
                is_cancelled = tokens.finished.reason is FinishReason.CANCELLED
                assert is_cancelled == (tokens.request in self.cancelled)
        for bridge, rejected in self.engine.take_rejected():
            assert bridge == b"bridge"
            assert rejected.request not in self.ended
            assert not self.contents[rejected.request]
            self.ended.add(rejected.request)

    @rule(number=st.integers(1, 30))
    def cancel(self, number: int) -> None:
        is_there = self.engine.has_request(b"bridge", number)
        assert is_there == (0 < number <= self.number and number not in self.ended)
        assert self.engine.cancel(b"bridge", number) == is_there
        self.cancelled |= {number} if is_there else set()

    @rule()
    def drop_all(self) -> None:
        self.cancelled |= {*self.engine.requests_of(b"bridge")}
        self.engine.cancel_bridge(b"bridge")

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for (_, number), request in self.engine._requests.items():
            own = 0 if request.adapter is None else self.held.contents[request.adapter.number]
            assert own == max(self.contents[number], 0)

    def teardown(self) -> None:
        while hasattr(self, "engine") and self.engine.has_work:
            while self.threads.waiting:
                self.threads.run()
            self.take(self.engine.step())
        assert not hasattr(self, "engine") or self.ended == set(range(1, self.number + 1))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


class ReadingHouse(House):
    """A small model, whose engine reads weights in a thread."""

    def restart(self, limits: Limits | None = None) -> None:
        super().restart(limits)
        self.asker.engine = ReadingEngine(
            limits or Limits(8, 64), self.runner, None, adapters=self.store
        )


def test_others_go_on_while_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read ends only after a stream that began beside it has all its tokens."""
    house = ReadingHouse(tmp_path)
    may_read, read = Event(), house.runner.adapters.read_task

    def slowly(task: LoraTask) -> object:
        assert may_read.wait(300), "the stream did not go on"
        return read(task)

    monkeypatch.setattr(house.runner.adapters, "read_task", slowly)
    weights, config = task_arrays(house.pairs["a"], scale_of(4))
    task = LoraTask(2**64 - 1, *weights.shape, weights.tobytes(), config.tobytes())
    prompts = random_prompts([9, 12, 7])
    brings = house.submit(prompts[0], task)
    follows = house.submit(prompts[1], LoraTask(2**64 - 1))
    stream = house.submit(prompts[2], "")
    while house.asker.answers[stream, 0].reason is None:
        house.asker.step()
    assert house.asker.answers[brings, 0].token_ids == []
    may_read.set()
    house.asker.drain()
    for number, name, prompt in ((brings, "a", 0), (follows, "a", 1), (stream, "", 2)):
        expected = house.expected(prompts[prompt], name)
        assert house.asker.answers[number, 0].token_ids == expected


def test_weights_that_wait_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 10)
    machine = Machine()
    machine.begin()
    task = LoraTask(1, 2, 2, bytes([1, *bytes(7)]), bytes(24))
    for number, is_refused in enumerate((False, True)):
        message = Submit(number, pack([1]), GREEDY, 1, task=task)
        if not is_refused:
            machine.engine.submit(b"bridge", message)
            continue
        with pytest.raises(ContractError, match="8 bytes of weights, and 8 bytes of others") as no:
            machine.engine.submit(b"bridge", message)
        assert no.value.code is Code.UNAVAILABLE


def test_many_numbers_take_no_longer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What numbers keep is counted as they come and go, not added up again for each."""
    held = Reader()
    store = AdapterStore(held, max_task_bytes=2)
    for number in range(1, 50):
        task = LoraTask(number, 1, 1, bytes([1 + number % 3, 0]), bytes(12))
        store.choose(Submit(number, pack([1]), GREEDY, 1, task=task))
        store.check_integrity()
    assert store._tasks._num_bytes == 2
    assert len(held.stored) == 2
