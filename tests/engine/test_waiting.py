"""Admission: order, its bound on waiting, both limits, and when to come again."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.engine.sequence import Request, Sequence
from slipstream.engine.waiting import OLDEST_EVERY, WaitingQueue
from slipstream_contract.admission import MAX_RETRY_MS, MIN_RETRY_MS
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

MS = 1_000_000


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_ns = 5 * MS

    def __call__(self) -> int:
        return self.now_ns


def new(number: int, priority: int = 5, num_tokens: int = 1) -> Sequence:
    sampling = SamplingParams(max_tokens=4)
    request = Request(b"bridge", number, sampling, 1, priority)
    return Sequence(number, request, 0, pack([1] * num_tokens), 0, 100, None)


def admit(queue: WaitingQueue) -> Sequence:
    sequence = queue.head()
    assert sequence is not None
    queue.admit(sequence)
    return sequence


def filled(clock: Callable[[], int], *sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(100, 1000, clock)
    for sequence in sequences:
        queue.add(sequence)
    return queue


def test_by_priority_then_by_arrival() -> None:
    queue = filled(Clock(), *(new(i, p) for i, p in enumerate([5, 0, 9, 5, 0])))
    assert [admit(queue).id for _ in range(5)] == [1, 4, 0, 3, 2]
    assert queue.head() is None
    assert len(queue) == 0


def test_those_who_ran_go_first_the_last_of_them_before_all() -> None:
    queue = filled(Clock(), new(7, priority=0))
    queue.put_first(new(3, priority=9))
    queue.put_first(new(2, priority=9))
    assert [admit(queue).id for _ in range(3)] == [2, 3, 7]


def test_one_that_left_is_not_admitted() -> None:
    queue = filled(Clock(), new(0), new(1), new(2))
    sequence = queue.head()
    assert sequence is not None
    assert queue.discard(sequence)
    assert not queue.discard(sequence)
    assert [admit(queue).id for _ in range(2)] == [1, 2]


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=200), st.integers(0, 9))
def test_nobody_is_passed_for_ever(events: list[int | None], last: int) -> None:
    """None admits one, a number lets one of that priority come."""
    queue, age, older, alive = WaitingQueue(10**6, 10**6, Clock()), {}, {}, set()
    num_admitted = 0
    for number, event in enumerate([*events, last, *[None] * 200]):
        if event is not None:
            older[number], age[number] = len(alive), num_admitted
            alive.add(number)
            queue.add(new(number, event))
        elif alive:
            sequence = admit(queue)
            num_admitted += 1
            alive.remove(sequence.id)
            num_waited = num_admitted - age[sequence.id]
            assert num_waited <= OLDEST_EVERY * (older[sequence.id] + 1)
        queue.check_integrity()


def test_the_bound_is_reached_under_a_flood_of_higher_priority() -> None:
    queue = filled(Clock(), new(0, priority=9))
    admitted = []
    for number in range(1, OLDEST_EVERY + 1):
        queue.add(new(number, priority=0))
        admitted.append(admit(queue).id)
    assert admitted == [*range(1, OLDEST_EVERY), 0]


def test_too_many_requests() -> None:
    queue = WaitingQueue(2, 1000, Clock())
    for number in range(2):
        queue.load(3).check(1)
        queue.add(new(number, num_tokens=10))
    with pytest.raises(ContractError) as caught:
        queue.load(3).check(1)
    assert str(caught.value) == (
        "UNAVAILABLE: the engine is full: 2 requests wait with 20 tokens, max_waiting is 2 "
        f"(3 sequences are running); retry_after_ms: {MAX_RETRY_MS}"
    )


def test_too_many_tokens() -> None:
    queue = WaitingQueue(100, 50, Clock())
    queue.load(0).check(60)  # alone it may wait
    queue.add(new(0, num_tokens=30))
    queue.load(0).check(20)
    with pytest.raises(ContractError, match=r"max_waiting_tokens is 50, this prompt has 21 \(3 se"):
        queue.load(3).check(21)
    admit(queue)
    queue.load(0).check(60)
    assert queue.num_tokens == 0


def retry_ms(queue: WaitingQueue, num_tokens: int) -> int:
    with pytest.raises(ContractError) as caught:
        queue.load(0).check(num_tokens)
    return int(caught.value.message.rpartition("retry_after_ms: ")[2])


def test_when_to_come_again_follows_the_recent_rate() -> None:
    clock = Clock()
    queue = WaitingQueue(1000, 100, clock)
    clock.now_ns += 10**15  # an idle time does not count
    for number in range(4):
        queue.add(new(number, num_tokens=30))
    for _ in range(2):
        clock.now_ns += 500 * MS
        admit(queue)
    # 60 tokens wait, 60 were admitted in 1 s: 20 too many take a third of a second.
    assert retry_ms(queue, 60) == 333
    clock.now_ns += 1000 * MS
    assert retry_ms(queue, 60) == 667
    assert retry_ms(queue, 41) == MIN_RETRY_MS
    assert retry_ms(queue, 10**6) == MAX_RETRY_MS


def test_when_to_come_again_with_too_many_requests() -> None:
    clock = Clock()
    queue = WaitingQueue(300, 10**6, clock)
    for number in range(900):
        queue.add(new(number))
    for _ in range(600):  # more than are remembered
        clock.now_ns += 200 * MS
        admit(queue)
    assert retry_ms(queue, 1) == 200
    queue.check_integrity()
