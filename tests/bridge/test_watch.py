"""Calls that are ended because their client has left, or because a silent engine lets time pass."""

import re
import time

import pytest
from fixtures.bridge.streams import Desk, Recorder, finished, step
from fixtures.waiting import wait_for
from slipstream import wire
from slipstream.bridge.flow import Flow
from slipstream.bridge.watch import Watch
from slipstream_runtime.credit import CreditFile, Taker

MS = 1_000_000


@pytest.fixture
def desk():
    desk = Desk()
    watch = Watch(desk.calls, lambda: False)
    yield desk
    watch.close()
    desk.senders.close()


def open_until(desk: Desk, reply: Recorder, seconds: float, **options: object):
    call = desk.open(reply, **options)
    call.timeout_ns = 2500 * MS
    call.deadline_ns = time.monotonic_ns() + int(seconds * 1e9)
    return call


def test_a_client_that_has_left_is_noticed_and_others_are_not_touched(desk):
    reply, other = Recorder(), Recorder()
    (number,) = desk.open(reply).routes
    desk.open(other)
    time.sleep(0.1)
    assert not reply.done.is_set()
    reply.is_gone = True
    wait_for(reply.done.is_set)
    assert desk.cancelled() == [(number, wire.CancelCause.CLIENT)]
    assert not other.done.is_set()


def test_an_engine_that_tells_nothing_does_not_outlive_a_deadline_by_long(desk):
    reply, other = Recorder(), Recorder()
    call = open_until(desk, reply, -0.5, n=2)
    open_until(desk, other, 3600)
    never = desk.open(Recorder())
    (number,) = call.routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    desk.calls.take(step(wire.Tokens(number, 1, [2], [], finished=finished())))
    wait_for(reply.done.is_set)
    found = re.fullmatch(
        r"DEADLINE_EXCEEDED: (\d+) ms have passed, of 2500 asked for by timeout_ms or timeout; "
        "the engine has not ended it",
        str(reply.error),
    )
    assert found, reply.error
    assert int(found[1]) >= 3500  # the engine has a second to say it better
    assert sorted(reply.ids) == [1, 2]
    assert desk.cancelled() == [(number, wire.CancelCause.DEADLINE)]
    time.sleep(0.1)
    assert not other.done.is_set()
    assert not never.is_over


def test_tokens_made_in_time_are_sent_however_long_that_takes(desk, tmp_path):
    flow = Flow(CreditFile(tmp_path / "credits"), desk.senders.hand_over, desk.calls.cancel)
    taker = Taker(CreditFile(tmp_path / "credits"))
    taker.start()
    reply = Recorder()
    call = open_until(desk, reply, 3600, flow=flow)
    (number,) = call.routes
    desk.calls.take(step(wire.Tokens(number, 0, [1], [])))
    wait_for(lambda: reply.responses)
    desk.calls.take(step(wire.Tokens(number, 0, [2], [], finished=finished())))
    call.deadline_ns = 1
    time.sleep(0.2)
    taker.acknowledge(*reply.responses[0][1])
    assert reply.done.wait(120)
    assert reply.error is None
    assert reply.ids == [1, 2]
    flow.close()
    taker.close()


class Asked(Recorder):
    """A reply that counts how often it is checked for a cancel."""

    num_asked = 0

    def is_cancelled(self):
        self.num_asked += 1
        return False


def test_many_calls_are_all_asked_but_no_more_often_than_the_server_can_bear(desk):
    replies = [Asked() for _ in range(600)]
    begin = time.monotonic()
    for reply in replies:
        desk.open(reply)
    wait_for(lambda: all(reply.num_asked > 1 for reply in replies))
    wait_for(lambda: time.monotonic() - begin > 1)
    num_asked = sum(reply.num_asked for reply in replies)
    assert num_asked < 3000 * (time.monotonic() - begin)


def test_a_call_of_an_ensemble_is_not_checked_as_it_gets_no_notice(desk):
    step_of_ensemble, other = Asked(), Asked()
    desk.open(step_of_ensemble, is_step=True)
    desk.open(other)
    wait_for(lambda: other.num_asked > 2)
    assert step_of_ensemble.num_asked == 0


def test_a_server_that_ends_is_noticed_soon_however_many_calls_there_are():
    class Ends(Asked):
        """Let the server begin to stop during this check."""

        def is_cancelled(self):
            ends.append(sum(reply.num_asked for reply in replies))
            return super().is_cancelled()

    desk, ends = Desk(), []
    replies = [Asked() for _ in range(4000)]  # asking all of them takes 1.6 s
    replies[100] = Ends()
    for reply in replies:
        desk.open(reply)
    watch = Watch(desk.calls, lambda: bool(ends))
    wait_for(lambda: all(reply.done.is_set() for reply in replies))
    assert sum(reply.num_asked for reply in replies) - ends[0] <= 16  # the burst it was in
    watch.close()
    desk.senders.close()
