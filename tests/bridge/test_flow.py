"""Flow control: what waits for an acknowledgement, and what its absence proves."""

import time

import pytest
from bridge.test_streams import (
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
from slipstream_contract.credit import CreditFile, Heartbeat
from slipstream_contract.errors import Code


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.senders.close()


@pytest.fixture
def flow(desk, tmp_path):
    """Flow control, and postprocessing's end of its file."""
    flow = Flow(CreditFile(tmp_path / "credits"), desk.senders.hand_over, desk.calls.cancel)
    flow.other_end = CreditFile(tmp_path / "credits")
    desk.calls.settle = flow.settle
    yield flow
    flow.close()


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
    flow.other_end.acknowledge(slot, first - 1)  # late, of somebody who had the slot before
    time.sleep(0.05)
    assert len(reply.responses) == 1
    flow.other_end.acknowledge(slot, first)
    wait_for(lambda: len(reply.responses) == 2)
    assert reply.ids == list(range(10))
    flow.other_end.acknowledge(slot, first + 1)
    desk.calls.take(step(wire.Tokens(number, 0, [], [], finished=finished())))
    assert reply.done.wait(5)


def test_a_cancel_that_postprocessing_meets_ends_the_call(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    flow.other_end.mark_cancelled(*reply.responses[0][1])
    assert wait_for(reply.done.is_set) < 0.3
    assert desk.cancelled() == [(number, wire.CancelCause.CLIENT)]


def test_a_later_response_that_is_acknowledged_proves_that_ours_was_dropped(desk, flow):
    ours, theirs = Recorder(), Recorder()
    (one,) = desk.open(ours, flow=flow).routes
    (two,) = desk.open(theirs, flow=flow).routes
    desk.calls.take(step(wire.Tokens(one, 0, [1], [])))
    wait_for(lambda: ours.responses)
    desk.calls.take(step(wire.Tokens(two, 0, [1], [])))
    wait_for(lambda: theirs.responses)
    time.sleep(0.05)
    assert not ours.done.is_set()
    flow.other_end.acknowledge(*theirs.responses[0][1])
    assert wait_for(ours.done.is_set) < 0.3
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
    flow.other_end.acknowledge(*theirs.responses[0][1])
    time.sleep(0.6)  # and nothing from time alone, while nobody tells that postprocessing is idle
    assert not ours.done.is_set()


def test_alone_a_drop_is_concluded_only_from_an_idle_postprocessing(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    heart = Heartbeat(flow.other_end)
    with heart.work():
        desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
        wait_for(lambda: reply.responses)
        time.sleep(0.6)
        assert not reply.done.is_set()  # it is busy: ours may be the next
    idle = time.monotonic()
    wait_for(reply.done.is_set)
    assert 0.35 < time.monotonic() - idle < 0.7
    heart.close()


def test_an_error_waits_for_what_postprocessing_still_has(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    desk.calls.lose()
    desk.calls.take(step(wire.Tokens(number, 0, [2], [])))
    time.sleep(0.1)
    assert reply.error is None
    flow.other_end.acknowledge(*reply.responses[0][1])
    assert wait_for(reply.done.is_set) < 0.3
    assert reply.error.code is Code.UNAVAILABLE
    assert reply.ids == [1]


def test_an_error_does_not_wait_for_ever(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    desk.calls.lose()
    assert 0.7 < wait_for(reply.done.is_set) < 1.5
    assert reply.error.code is Code.UNAVAILABLE


def test_slots_are_used_oldest_first_and_given_back_once(desk, flow):
    before = len(flow._slots)
    seen = []
    for _ in range(5):
        reply = Recorder()
        call = desk.open(reply, flow=flow)
        seen.append(call.streams[0].credit.slot)
        desk.calls.cancel(call)
        desk.calls.forget(call)
    assert seen == [0, 1, 2, 3, 4]
    assert len(flow._slots) == before


def test_over_time_the_last_tokens_and_the_error_each_wait_for_postprocessing(desk, flow):
    reply = Recorder()
    (number,) = desk.open(reply, flow=flow).routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    desk.calls.take(step(overdue(number, 0, [2])))
    time.sleep(0.05)
    assert reply.ids == [1]
    flow.other_end.acknowledge(*reply.responses[0][1])
    wait_for(lambda: reply.ids == [1, 2])
    time.sleep(0.1)
    assert reply.error is None
    flow.other_end.acknowledge(*reply.responses[1][1])
    check_overdue(reply)


def test_many_that_were_dropped_are_found_by_one_that_came_after_them(desk, flow):
    """However many wait before it: an acknowledgement is looked for behind them too."""
    replies = [Recorder() for _ in range(60)]
    *dropped, last = replies
    for reply in replies:
        (number,) = desk.open(reply, flow=flow).routes
        desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
        wait_for(lambda reply=reply: reply.responses)
    time.sleep(0.05)
    flow.other_end.acknowledge(*last.responses[0][1])
    wait_for(lambda: all(reply.done.is_set() for reply in dropped))
    assert not last.done.is_set()
    assert len(desk.sent) == len(dropped)


def test_every_stream_goes_on_when_all_are_acknowledged_at_once(desk, flow):
    replies = [Recorder() for _ in range(60)]
    numbers = [next(iter(desk.open(reply, flow=flow).routes)) for reply in replies]
    for position in range(4):
        desk.calls.take(step(*(wire.Tokens(number, 0, [position], []) for number in numbers)))
        wait_for(lambda count=position + 1: all(len(r.ids) == count for r in replies))
        for reply in replies:
            flow.other_end.acknowledge(*reply.responses[-1][1])
    assert all(reply.ids == [0, 1, 2, 3] for reply in replies)
    assert all(len(reply.responses) == 4 for reply in replies)
