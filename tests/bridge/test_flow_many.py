"""Flow control of many streams: the window, its turns, and what was dropped among them."""

import random
import time

import pytest
from fixtures.bridge.streams import Desk, Recorder, check_overdue, finished, overdue, step
from fixtures.waiting import wait_for
from slipstream import wire
from slipstream.bridge.flow import Flow
from slipstream_runtime.credit import Taker


class Postprocessing:
    """A postprocessing that takes responses in the order of sending, as the server does."""

    def __init__(self, desk: Desk, flow: Flow) -> None:
        self._desk, self._flow = desk, flow
        self._came: list[tuple[Recorder, list[int]]] = []

    def open(self, count: int) -> tuple[list[Recorder], list[int]]:
        """Return streams whose first responses are acknowledged, and their requests."""
        replies = [Ordered(self._came) for _ in range(count)]
        numbers = [next(iter(self._desk.open(r, flow=self._flow).routes)) for r in replies]
        self._desk.calls.take(step(*(wire.Tokens(number, 0, [0], []) for number in numbers)))
        wait_for(lambda: all(reply.responses for reply in replies))
        self.acknowledge()
        wait_for(lambda: not self._flow._watched)
        return replies, numbers

    def acknowledge(self, dropped: list[Recorder] | None = None) -> None:
        """Take all responses, except those of clients that have left."""
        while self._came:
            reply, stamp = self._came.pop(0)
            if reply not in (dropped or []):
                self._flow.taker.acknowledge(*stamp)


class Ordered(Recorder):
    def __init__(self, came) -> None:
        super().__init__()
        self._came = came

    def send(self, outputs, is_final):
        if outputs:
            self._came.append((self, outputs["stamp"].tolist()))
        super().send(outputs, is_final)


@pytest.fixture
def post(desk, flow):
    return Postprocessing(desk, flow)


def num_responses(replies: list[Recorder]) -> int:
    return sum(len(reply.responses) for reply in replies)


def test_opening_a_slot_notes_a_check_of_its_client(desk, flow):
    before_ns = time.monotonic_ns()
    desk.open(Recorder(), flow=flow)
    [call] = desk.calls.snapshot()
    credit = call.streams[0].credit
    number, asked_ns = flow.other_end.last_check(credit.slot)
    assert number == credit.next_number - 1
    assert before_ns <= asked_ns <= time.monotonic_ns()


def test_many_that_were_dropped_are_found_by_one_that_came_after_them(desk, flow):
    """An acknowledgement is found however many streams wait before it."""
    replies = [Recorder() for _ in range(60)]
    *dropped, last = replies
    for count, reply in enumerate(replies, 1):
        (number,) = desk.open(reply, flow=flow).routes
        desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
        wait_for(lambda count=count: len(flow._watched) == count)
    time.sleep(0.05)
    flow.taker.acknowledge(*last.responses[0][1])
    wait_for(lambda: all(reply.done.is_set() for reply in dropped))
    assert not last.done.is_set()
    assert len(desk.sent) == len(dropped)


def test_every_stream_goes_on_when_all_are_acknowledged_at_once(desk, post):
    replies, numbers = post.open(60)
    for position in (1, 2, 3):
        desk.calls.take(step(*(wire.Tokens(number, 0, [position], []) for number in numbers)))
        wait_for(lambda count=60 * (position + 1): num_responses(replies) == count)
        post.acknowledge()
    assert all(reply.ids == [0, 1, 2, 3] for reply in replies)


@pytest.fixture
def small(monkeypatch):
    """A window of 8 that never lets one more in."""
    monkeypatch.setattr("slipstream.bridge.flow._WINDOW", 8)
    monkeypatch.setattr("slipstream.bridge.flow._PROBE_NS", 1 << 60)


@pytest.mark.usefixtures("small")
def test_a_window_limits_responses_and_a_waiting_stream_takes_up_new_tokens(desk, post):
    replies, numbers = post.open(20)
    for position in (1, 2, 3):
        desk.calls.take(step(*(wire.Tokens(number, 0, [position], []) for number in numbers)))
        wait_for(lambda: num_responses(replies) == 28)
    time.sleep(0.1)
    waiting = [reply for reply in replies if len(reply.responses) == 1]
    assert len(waiting) == 12

    def is_all_told() -> bool:
        post.acknowledge()
        return all(reply.ids == [0, 1, 2, 3] for reply in replies)

    wait_for(is_all_told)
    assert all(len(reply.responses) == 2 for reply in waiting)  # all three in one


@pytest.mark.usefixtures("small")
def test_first_and_last_responses_do_not_wait(desk, flow, post):
    replies, numbers = post.open(20)
    *others, last = numbers
    desk.calls.take(step(*(wire.Tokens(number, 0, [1], []) for number in others)))
    wait_for(lambda: num_responses(replies) == 28)
    desk.calls.take(step(wire.Tokens(last, 0, [1], [], finished=finished())))
    assert replies[-1].done.wait(120)
    new = Recorder()
    (number,) = desk.open(new, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: new.responses)


@pytest.mark.usefixtures("small")
def test_the_places_of_cancelled_streams_are_taken_by_those_that_wait(desk, flow, post):
    replies, numbers = post.open(24)
    calls = [desk.calls._routes[number] for number in numbers]
    desk.calls.take(step(*(wire.Tokens(number, 0, [1], []) for number in numbers)))
    for count in (8, 16, 24):
        wait_for(lambda count=count: num_responses(replies) >= 24 + count)
        for call, reply in zip(calls, replies, strict=True):
            if len(reply.responses) == 2:
                desk.calls.cancel(call)
    wait_for(lambda: flow._num_under_way == 0)


@pytest.mark.usefixtures("small")
def test_a_sequence_that_ends_before_its_siblings_gives_its_place_back(desk, flow):
    pair = Recorder()
    (number,) = desk.open(pair, n=2, flow=flow).routes
    desk.calls.take(step(*(wire.Tokens(number, index, [0], []) for index in (0, 1))))
    for count in (1, 2):
        wait_for(lambda count=count: len(pair.responses) == count)
        flow.taker.acknowledge(*pair.responses[-1][1])
    wait_for(lambda: not flow._watched)
    desk.calls.take(step(wire.Tokens(number, 0, [1], [], finished=finished())))
    wait_for(lambda: len(pair.responses) == 3)
    flow.taker.acknowledge(*pair.responses[-1][1])
    wait_for(lambda: flow._num_under_way == 0)
    assert not pair.done.is_set()


@pytest.mark.parametrize("is_streaming", [True, False])
def test_streams_of_one_call_take_turns_and_others_need_not_wait(desk, flow, is_streaming):
    many, other = Recorder(), Recorder()
    (number,) = desk.open(many, n=4, is_streaming=is_streaming, flow=flow).routes
    (single,) = desk.open(other, flow=flow).routes
    end = None if is_streaming else finished()
    told = [wire.Tokens(number, index, [index], [], finished=end) for index in range(4)]
    desk.calls.take(step(*told, wire.Tokens(single, 0, [9], [])))
    wait_for(lambda: other.responses)
    for count in range(1, 4):
        wait_for(lambda count=count: len(many.responses) == count)
        time.sleep(0.02)
        assert len(many.responses) == count
        flow.taker.acknowledge(*many.responses[-1][1])
    wait_for(lambda: len(many.responses) == 4)
    assert sorted(many.ids) == [0, 1, 2, 3]
    assert many.done.is_set() == (not is_streaming)


def test_a_stream_that_has_nothing_to_tell_passes_its_turn_on(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, n=3, flow=flow).routes
    desk.calls.take(step(*(overdue(number, index, []) for index in range(3))))
    check_overdue(reply)


def test_a_window_full_of_dropped_responses_does_not_hold_others_up(desk, post, monkeypatch):
    monkeypatch.setattr("slipstream.bridge.flow._WINDOW", 8)
    replies, numbers = post.open(20)
    dropped, others = replies[:8], replies[8:]
    for part in (numbers[:8], numbers[8:]):
        desk.calls.take(step(*(wire.Tokens(number, 0, [1], []) for number in part)))
        wait_for(lambda: num_responses(replies) >= 28)

    def is_all_told() -> bool:
        post.acknowledge(dropped)
        return all(reply.ids == [0, 1] for reply in others)

    wait_for(is_all_told)
    wait_for(lambda: all(reply.done.is_set() for reply in dropped))
    assert not any(reply.done.is_set() for reply in others)


@pytest.mark.parametrize("seed", range(6))
def test_only_dropped_responses_count_as_dropped_whichever_process_takes_what(desk, flow, seed):
    """Batches go in order to processes of any speed; dropped responses are in none."""
    choose = random.Random(seed)
    takers = [flow.taker, *(Taker(flow.other_end) for _ in range(choose.randint(0, 3)))]
    came: list[tuple[Recorder, list[int]]] = []
    replies = [Ordered(came) for _ in range(30)]
    numbers = [next(iter(desk.open(reply, flow=flow).routes)) for reply in replies]
    dropped = choose.sample(replies, 8)
    hands: dict[int, list[list[int]]] = {taker.index: [] for taker in takers}
    deadline = time.monotonic() + 120
    while not all(reply.done.is_set() for reply in dropped):
        assert time.monotonic() < deadline
        for number in choose.sample(numbers, choose.randint(1, 30)):
            desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
        time.sleep(0.001)
        for taker in choose.sample(takers, choose.randint(1, len(takers))):
            if hands[taker.index]:
                for stamp in hands[taker.index]:
                    taker.acknowledge(*stamp)
                hands[taker.index] = []
            else:
                taken = [came.pop(0) for _ in range(choose.randint(0, len(came)))]
                hands[taker.index] = [stamp for reply, stamp in taken if reply not in dropped]
    assert not any(reply.done.is_set() for reply in replies if reply not in dropped)
    for taker in takers[1:]:
        taker.close()
