"""Admission: order, the bound on waiting, both limits, and when to try again."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.sequence import Request, Sequence
from slipstream.engine.waiting import OLDEST_EVERY, WaitingQueue
from slipstream.wire import Submit
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from slipstream_runtime.admission import MAX_RETRY_MS, MIN_RETRY_MS

MS = 1_000_000


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 5 * MS

    def __call__(self) -> int:
        return self.now_ns


def new(number: int, priority: int = 5, num_tokens: int = 1) -> Sequence:
    sampling = SamplingParams(max_tokens=4)
    prompt = pack([1] * num_tokens)
    request = Request(b"bridge", Submit(number, prompt, sampling, 1, priority))
    return Sequence(number, request, 0, prompt, 0, 100, None)


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
    """Run events: None admits a request, a number adds one of that priority."""
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


class Turns:
    """A queue whose heads are deferred now and then; records how late each is admitted."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(10**6, 10**6, Clock())
        self.num_admitted = 0
        self.since: dict[int, tuple[int, int]] = {}  # admitted before it came, older ones then
        self.woken: dict[int, tuple[int, int]] = {}  # likewise, when it was woken
        self.held: dict[int, int] = {}  # its leader

    def older(self, number: int) -> int:
        return sum(sequence.id < number for sequence in self.queue)

    def add(self, priority: int) -> None:
        number = len(self.since)
        self.since[number] = self.num_admitted, self.older(number)
        self.queue.add(new(number, priority))

    def hold(self, leader_id: int) -> None:
        if (sequence := self.queue.head()) is not None:
            self.queue.defer(sequence, leader_id)
            self.held[sequence.id] = leader_id

    def wake(self, leader_id: int) -> None:
        self.queue.wake(leader_id)
        for number in [n for n, leader in self.held.items() if leader == leader_id]:
            del self.held[number]
            self.woken[number] = self.num_admitted, self.older(number)

    def admit(self) -> None:
        if (sequence := self.queue.head()) is None:
            return
        self.queue.admit(sequence)
        self.num_admitted += 1
        since, num_older = self.since[sequence.id]
        if self.num_admitted - since > OLDEST_EVERY * (num_older + 1):
            since, num_older = self.woken[sequence.id]  # who was never held is not late
            assert self.num_admitted - since <= 2 * (num_older + 1)


turns = st.one_of(
    st.tuples(st.just("admit")),
    st.tuples(st.just("add"), st.sampled_from([0, 0, 0, 1, 5, 9])),
    st.tuples(st.sampled_from(["hold", "wake"]), st.integers(1000, 1002)),
)


@given(st.lists(turns, min_size=60, max_size=200))
def test_only_who_is_held_is_late_and_goes_once_it_is_woken(
    events: list[tuple[str] | tuple[str, int]],
) -> None:
    turns = Turns()
    wake = [("wake", leader_id) for leader_id in range(1000, 1003)]
    for name, *args in [*events, *wake, *[("admit",)] * len(events)]:
        getattr(turns, name)(*args)
        turns.queue.check_integrity()
    assert not turns.queue


def hold(queue: WaitingQueue, number: int, leader_id: int) -> None:
    """Admit the head, and assert that it has this number."""
    sequence = queue.head()
    assert sequence is not None
    assert sequence.id == number
    queue.defer(sequence, leader_id)


@pytest.mark.parametrize(
    ("num_meanwhile", "then"),
    [(4, [0, 12, 13]), (8, [16, 0, 17])],  # the next turn is 16's
)
def test_who_is_held_at_its_turn_keeps_it(num_meanwhile: int, then: list[int]) -> None:
    queue = filled(Clock(), new(0, priority=9), *(new(i, priority=0) for i in range(1, 30)))
    assert [admit(queue).id for _ in range(OLDEST_EVERY - 1)] == [*range(1, OLDEST_EVERY)]
    hold(queue, 0, leader_id=100)
    assert [admit(queue).id for _ in range(num_meanwhile)] == [*range(8, 8 + num_meanwhile)]
    queue.wake(100)
    queue.check_integrity()
    assert [admit(queue).id for _ in range(3)] == then


@pytest.mark.parametrize(
    ("num_meanwhile", "then"), [(3, [0, 12, 13, 14, 15, 1]), (9, [0, 1, 18, 19, 20, 21])]
)
def test_a_turn_that_passes_is_kept_for_one_of_those_who_are_held(
    num_meanwhile: int, then: list[int]
) -> None:
    queue = filled(Clock(), new(0, 8), new(1, 9), *(new(i, priority=0) for i in range(2, 40)))
    for _ in range(OLDEST_EVERY - 1):
        admit(queue)
    hold(queue, 0, leader_id=100)
    hold(queue, 1, leader_id=100)
    for _ in range(num_meanwhile):
        admit(queue)
    queue.wake(100)
    assert [admit(queue).id for _ in range(6)] == then


def test_no_turn_is_kept_that_an_older_one_takes() -> None:
    queue = filled(Clock(), new(0, priority=9), new(1, priority=5))
    hold(queue, 1, leader_id=100)
    for number in range(2, 12):
        queue.add(new(number, priority=0))
    assert [admit(queue).id for _ in range(OLDEST_EVERY)] == [*range(2, OLDEST_EVERY + 1), 0]
    queue.wake(100)
    assert [admit(queue).id for _ in range(4)] == [9, 10, 11, 1]


def test_a_turn_that_one_takes_who_had_his_is_kept_for_the_next() -> None:
    queue = filled(Clock(), new(0, 9), new(1, 9), *(new(i, priority=0) for i in range(2, 9)))
    for _ in range(OLDEST_EVERY - 1):
        admit(queue)
    hold(queue, 0, leader_id=100)
    hold(queue, 1, leader_id=101)
    for number in range(10, 10 + OLDEST_EVERY):
        queue.add(new(number, priority=0))
        assert admit(queue).id == number  # the first of them at the turn of 0
    queue.wake(100)
    assert admit(queue).id == 0  # at the turn of 1
    for number in range(20, 22):
        queue.add(new(number, priority=0))
    queue.wake(101)
    assert [admit(queue).id for _ in range(2)] == [1, 20]


def test_those_who_are_woken_stand_by_arrival_whoever_woke_them() -> None:
    queue = filled(Clock(), *(new(number) for number in range(5)))
    for number, leader_id in enumerate([100, 101, 100, 101]):
        hold(queue, number, leader_id)
    queue.wake(100)
    queue.wake(101)
    queue.check_integrity()
    assert [admit(queue).id for _ in range(5)] == [0, 1, 2, 3, 4]


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
        queue.load(3).raise_if_full(1)
        queue.add(new(number, num_tokens=10))
    with pytest.raises(ContractError) as caught:
        queue.load(3).raise_if_full(1)
    assert str(caught.value) == (
        "UNAVAILABLE: the engine is full: 2 requests wait with 20 tokens, max_waiting is 2 "
        f"(3 sequences are running); retry_after_ms: {MAX_RETRY_MS}"
    )


def test_too_many_tokens() -> None:
    queue = WaitingQueue(100, 50, Clock())
    queue.load(0).raise_if_full(60)  # alone it may wait
    queue.add(new(0, num_tokens=30))
    queue.load(0).raise_if_full(20)
    with pytest.raises(ContractError, match=r"max_waiting_tokens is 50, this prompt has 21 \(3 se"):
        queue.load(3).raise_if_full(21)
    admit(queue)
    queue.load(0).raise_if_full(60)
    assert queue.num_tokens == 0


def retry_ms(queue: WaitingQueue, num_tokens: int) -> int:
    with pytest.raises(ContractError) as caught:
        queue.load(0).raise_if_full(num_tokens)
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
