"""Flow control: what waits for an acknowledgement, and what its absence proves."""

import os
import subprocess
import time

import pytest
from fixtures.bridge.streams import Recorder, check_overdue, finished, overdue, step
from fixtures.waiting import wait_for
from slipstream import wire
from slipstream.bridge.flow import Flow
from slipstream_contract.errors import Code
from slipstream_runtime.credit import Taker


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
    assert reply.done.wait(120)


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
    process = subprocess.Popen(["sleep", "600"])
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
