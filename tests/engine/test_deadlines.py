"""Requests past their deadline: in every state, with what was generated, nothing left behind."""

import pytest
from fixtures.engine.checks import check, greedy
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from slipstream.core.stop import Ending
from slipstream.engine.deadlines import Deadlines
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import FinishReason, Submit
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack

MS = 1_000_000


class Timed:
    """A client of an engine with a clock that the test sets."""

    def __init__(self, num_seqs: int) -> None:
        self.now_ns = 100 * MS
        engine = Engine(
            Limits(num_seqs, 6), CountingRunner(30, 4), Words(), clock=lambda: self.now_ns
        )
        self.client = Client(engine)

    def end(self, number: int, index: int = 0) -> tuple[FinishReason, str | None, int]:
        stream = self.client.streams[number, index]
        assert stream.last is not None
        assert stream.last.finished is not None
        finished = stream.last.finished
        return finished.reason, finished.error, len(stream.token_ids)


@pytest.mark.parametrize("num_steps", range(6))
def test_in_every_state(num_steps: int) -> None:
    # Running: 0 decodes, 1 is cut into chunks; waiting: 2 and, parked behind it, its siblings.
    asked = [([1], greedy(12)), ([2] * 20, greedy(9)), ([3] * 9, greedy(9, n=3))]
    for victim in range(3):
        timed = Timed(num_seqs=2)
        for number, (prompt, sampling) in enumerate(asked):
            deadline_ns = 105 * MS if number == victim else 0
            timed.client.submit(prompt, sampling, deadline_ns=deadline_ns)
        for _ in range(num_steps):
            timed.client.step()
        timed.now_ns = 107 * MS
        timed.client.step()
        assert (timed.client.name, victim) not in timed.client.engine._requests
        timed.client.drain()
        for number, (prompt, sampling) in enumerate(asked):
            if number != victim:
                check(timed.client, number, prompt, sampling)
        reason, error, num_tokens = timed.end(victim)
        assert reason is FinishReason.DEADLINE
        told = "it was waiting" if victim == 2 or not num_steps else f"{num_tokens} tokens were gen"
        assert error is not None
        assert error.startswith(
            "7 ms have passed, of 5 asked for by timeout_ms or timeout; " + told
        )
        assert (num_tokens > 0) == (victim == 0 and num_steps > 0) or victim == 1


def test_tokens_of_a_sibling_that_ended_before_count() -> None:
    timed = Timed(num_seqs=4)
    sampling = greedy(30, n=2, end_ids=())
    number = timed.client.submit([1], sampling, deadline_ns=150 * MS)
    while not timed.client.streams[number, 0].token_ids:
        timed.client.step()
    timed.client.engine._scheduler.finish(
        timed.client.engine._requests[timed.client.name, number].sequences[0],
        Ending(FinishReason.LENGTH),
    )
    timed.client.step()
    timed.now_ns = 150 * MS
    timed.client.step()
    reason, error, num_tokens = timed.end(number, 1)
    assert reason is FinishReason.DEADLINE
    total = num_tokens + len(timed.client.streams[number, 0].token_ids)
    assert error is not None
    assert error.endswith(f"; {total} tokens were generated")


def test_in_time_is_not_ended() -> None:
    timed = Timed(num_seqs=2)
    number = timed.client.submit([1], greedy(4), deadline_ns=100 * MS + 1)
    timed.client.drain()
    check(timed.client, number, [1], greedy(4))
    timed.now_ns = 10**12
    timed.client.submit([1], greedy(4))
    timed.client.drain()


def test_a_number_that_is_used_again_has_its_own_deadline() -> None:
    timed = Timed(num_seqs=2)
    engine, name = timed.client.engine, timed.client.name
    number = timed.client.submit([1], greedy(30), deadline_ns=105 * MS)
    engine.cancel(name, number)
    timed.client.step()
    engine.submit(name, Submit(number, pack([1]), greedy(30), 1, 5, 200 * MS, 90 * 10**6 * MS))
    timed.now_ns = 150 * MS
    engine.step()
    assert (name, number) in engine._requests
    timed.now_ns = 200 * MS
    (tokens,) = engine.step()[name]
    assert tokens.finished is not None
    assert tokens.finished.error is not None
    assert tokens.finished.error.startswith("90000000 ms have passed, of 90000000 asked for")


def test_a_priority_that_is_none_is_refused() -> None:
    engine = Timed(2).client.engine
    for priority in (-1, 10):
        with pytest.raises(ContractError, match=f"priority is {priority}, not from 0 to 9"):
            engine.submit(b"x", Submit(0, pack([1]), greedy(), 1, priority))
    assert not engine.has_work


def test_the_heap_forgets_those_that_ended() -> None:
    deadlines = Deadlines()
    alive = {(b"x", 7)}
    deadlines.add(10**6, (b"x", 7), alive)
    for number in range(100, 10_000):
        deadlines.add(10**9, (b"x", number), alive)
        assert len(deadlines) <= 1024
    assert next(iter(deadlines.take_due(10**6))) == (10**6, (b"x", 7))
    assert list(deadlines.take_due(10**6)) == []
