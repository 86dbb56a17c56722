"""Flow control: what waits for an acknowledgement, and what its absence proves."""

import math
import os
import random
import subprocess
import time

import pytest
from fixtures.bridge.streams import (
    Desk,
    Recorder,
    check_overdue,
    finished,
    overdue,
    step,
    wait_for,
)
from slipstream import wire
from slipstream.bridge.flow import Flow
from slipstream_contract.errors import Code
from slipstream_runtime.credit import CreditFile, Taker


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.senders.close()


@pytest.fixture
def flow(desk, tmp_path):
    """Flow control, and postprocessing's end of its file: a process that is at work."""

    def cancel(call, error):
        desk.calls.cancel(call, error)
        desk.calls.end_cancelled(math.inf)

    flow = Flow(CreditFile(tmp_path / "credits"), desk.senders.hand_over, cancel)
    flow.other_end = CreditFile(tmp_path / "credits")
    flow.taker = Taker(flow.other_end)
    flow.taker.start()
    desk.calls.settle = flow.settle
    yield flow
    flow.close()
    flow.taker.close()


def test_the_next_response_waits_for_the_acknowledgement_of_the_last(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [0], [])))
    wait_for(lambda: reply.responses)
    for position in range(1, 10):
        desk.calls.take(step(wire.Tokens(number, 0, [position], [])))
    time.sleep(0.05)
    assert len(reply.responses) == 1
    slot, first = reply.responses[0][1]
    flow.taker.acknowledge(slot, first - 1)  # late, of somebody who had the slot before
    time.sleep(0.05)
    assert len(reply.responses) == 1
    flow.taker.acknowledge(slot, first)
    wait_for(lambda: len(reply.responses) == 2)
    assert reply.ids == list(range(10))
    flow.taker.acknowledge(slot, first + 1)
    desk.calls.take(step(wire.Tokens(number, 0, [], [], finished=finished())))
    assert reply.done.wait(30)


class Leaving(Recorder):
    """Mark the client as gone, as postprocessing does, maybe with an acknowledgement."""

    def __init__(self, flow: Flow, is_acknowledged: bool) -> None:
        super().__init__()
        self._flow, self._is_acknowledged = flow, is_acknowledged

    def send(self, outputs, is_final):
        if outputs:
            slot, number = outputs["stamp"].tolist()
            self._flow.other_end.mark_cancelled(slot, number)
            if self._is_acknowledged:
                self._flow.taker.acknowledge(slot, number)
        super().send(outputs, is_final)


@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_cancel_that_postprocessing_meets_ends_the_call(desk, flow, is_acknowledged):
    reply = Leaving(flow, is_acknowledged)
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(reply.done.is_set)
    assert reply.error is None
    assert desk.cancelled() == [(number, wire.CancelCause.CLIENT)]
    assert flow.num_cancelled == 1


def test_a_later_response_that_is_acknowledged_proves_that_ours_was_dropped(desk, flow):
    ours, theirs = Recorder(), Recorder()
    (one,) = desk.open(ours, flow=flow).routes
    (two,) = desk.open(theirs, flow=flow).routes
    desk.calls.take(step(wire.Tokens(one, 0, [1], [])))
    wait_for(lambda: len(flow._watched) == 1)  # its sending has ended before the other's begins
    desk.calls.take(step(wire.Tokens(two, 0, [1], [])))
    wait_for(lambda: theirs.responses)
    time.sleep(0.05)
    assert not ours.done.is_set()
    flow.taker.acknowledge(*theirs.responses[0][1])
    wait_for(ours.done.is_set)
    assert ours.error.code is Code.UNAVAILABLE  # if not dropped, it was lost
    assert desk.cancelled() == [(one, wire.CancelCause.CLIENT)]
    assert not theirs.done.is_set()


def test_an_earlier_response_that_is_acknowledged_proves_nothing(desk, flow):
    ours, theirs = Recorder(), Recorder()
    (two,) = desk.open(theirs, flow=flow).routes
    (one,) = desk.open(ours, flow=flow).routes
    desk.calls.take(step(wire.Tokens(two, 0, [1], [])))
    wait_for(lambda: theirs.responses)
    desk.calls.take(step(wire.Tokens(one, 0, [1], [])))
    wait_for(lambda: ours.responses)
    flow.taker.acknowledge(*theirs.responses[0][1])
    time.sleep(0.6)  # and nothing from time alone, while nobody tells that postprocessing is idle
    assert not ours.done.is_set()


def test_alone_a_drop_is_concluded_only_from_an_idle_postprocessing(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    time.sleep(0.6)
    assert not reply.done.is_set()  # it is busy: ours may be the next
    busy_s = time.monotonic()
    flow.taker.finish()
    wait_for(reply.done.is_set)
    assert time.monotonic() - busy_s > 0.4


@pytest.mark.parametrize("how", ["later", "idle", "ended", "killed"])
def test_of_several_processes_each_must_have_passed_it(desk, flow, monkeypatch, how):
    process = subprocess.Popen(["sleep", "60"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: process.pid)
        other = Taker(flow.other_end)
    other.start()
    ours, theirs = Recorder(), Recorder()
    (one,) = desk.open(ours, flow=flow).routes
    (two,) = desk.open(theirs, flow=flow).routes
    desk.calls.take(step(wire.Tokens(one, 0, [1], [])))
    wait_for(lambda: len(flow._watched) == 1)
    for count in (1, 2):
        desk.calls.take(step(wire.Tokens(two, 0, [count], [])))
        wait_for(lambda count=count: len(theirs.responses) == count)
        if count == 1:
            flow.taker.acknowledge(*theirs.responses[-1][1])
    time.sleep(0.6)
    assert not ours.done.is_set()  # the other process may have it
    if how == "later":
        other.acknowledge(*theirs.responses[-1][1])
    elif how == "idle":
        other.finish()
    elif how == "ended":
        other.close()
    else:
        other._closed.set()  # it beats no more
        time.sleep(0.3)
        assert not ours.done.is_set()
    process.kill()
    process.wait()
    wait_for(ours.done.is_set)
    assert desk.cancelled() == [(one, wire.CancelCause.CLIENT)]
    if how != "ended":
        other.close()


def test_nothing_is_concluded_while_there_is_no_process(desk, flow):
    flow.taker.close()
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    time.sleep(0.6)
    assert not reply.done.is_set()
    flow.taker = Taker(flow.other_end)
    wait_for(reply.done.is_set)  # the new one is idle


def test_an_error_waits_for_what_postprocessing_still_has(desk, flow, monkeypatch):
    monkeypatch.setattr("slipstream.bridge.flow._MAX_SETTLE_NS", 1 << 60)
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    desk.calls.lose_engine()
    desk.calls.take(step(wire.Tokens(number, 0, [2], [])))
    time.sleep(0.1)
    assert reply.error is None
    flow.taker.acknowledge(*reply.responses[0][1])
    wait_for(reply.done.is_set)
    assert reply.error.code is Code.UNAVAILABLE
    assert reply.ids == [1]


def test_an_error_does_not_wait_for_ever(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    lost_s = time.monotonic()
    desk.calls.lose_engine()
    wait_for(reply.done.is_set)
    assert time.monotonic() - lost_s > 0.9
    assert reply.error.code is Code.UNAVAILABLE


def test_slots_are_used_oldest_first_and_given_back_once(desk, flow):
    before = len(flow._slots)
    seen = []
    for _ in range(5):
        reply = Recorder()
        call = desk.open(reply, flow=flow)
        seen.append(call.streams[0].credit.slot)
        desk.calls.cancel(call)
        desk.calls.remove(call)
    assert seen == [0, 1, 2, 3, 4]
    assert len(flow._slots) == before


def test_over_time_the_last_tokens_and_the_error_each_wait_for_postprocessing(
    desk, flow, monkeypatch
):
    monkeypatch.setattr("slipstream.bridge.flow._MAX_SETTLE_NS", 1 << 60)
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    desk.calls.take(step(overdue(number, 0, [2])))
    time.sleep(0.05)
    assert reply.ids == [1]
    flow.taker.acknowledge(*reply.responses[0][1])
    wait_for(lambda: reply.ids == [1, 2])
    time.sleep(0.1)
    assert reply.error is None
    flow.taker.acknowledge(*reply.responses[1][1])
    check_overdue(reply)


# --- many streams --------------------------------------------------------------------------------


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
    assert replies[-1].done.wait(30)
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
    deadline = time.monotonic() + 60
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
