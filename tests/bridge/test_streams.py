import math
import random
import time
import weakref

import pytest
from fixtures.bridge.streams import (
    PERF,
    Recorder,
    check_overdue,
    finished,
    overdue,
    step,
    without_collector,
)
from fixtures.waiting import wait_for
from slipstream import wire
from slipstream_contract.errors import Code, ContractError


def test_streams_of_many_calls_are_in_order_and_each_has_one_end(desk):
    draw = random.Random(1)
    replies = [Recorder(draw.choice([0, 0.0003])) for _ in range(40)]
    numbers = [next(iter(desk.open(reply).routes)) for reply in replies]
    for position in range(50):
        desk.calls.take(step(*(wire.Tokens(n, 0, [position], []) for n in numbers)))
    desk.calls.take(step(*(wire.Tokens(n, 0, [50], [], finished=finished()) for n in numbers)))
    for reply in replies:
        assert reply.done.wait(120)
        assert reply.ids == list(range(51))
        assert reply.num_after_end == 0
        assert reply.error is None
    assert desk.calls.snapshot() == []
    assert desk.sent == []  # nothing to cancel in the engine


def test_a_token_that_can_leave_leaves_alone(desk):
    replies = [Recorder() for _ in range(4)]
    numbers = [next(iter(desk.open(reply).routes)) for reply in replies]
    for position in range(20):
        desk.calls.take(step(*(wire.Tokens(n, 0, [position], []) for n in numbers)))
        wait_for(lambda count=position + 1: all(len(r.responses) == count for r in replies))
    assert all([ids for ids, _ in r.responses] == [[i] for i in range(20)] for r in replies)


def test_what_piles_up_while_a_response_is_sent_leaves_as_one(desk):
    reply = Recorder()
    reply.is_free.clear()
    (number,) = desk.open(reply).routes
    desk.calls.take(step(wire.Tokens(number, 0, [0], [])))
    wait_for(lambda: reply.num_begun)
    for position in range(1, 20):
        desk.calls.take(step(wire.Tokens(number, 0, [position], [])))
    desk.calls.take(step(wire.Tokens(number, 0, [], [], finished=finished())))
    reply.is_free.set()
    assert reply.done.wait(120)
    assert reply.ids == list(range(20))
    assert len(reply.responses) == 2


def test_without_streaming_there_is_one_response(desk):
    reply = Recorder()
    (number,) = desk.open(reply, is_streaming=False).routes
    for position in range(20):
        desk.calls.take(step(wire.Tokens(number, 0, [position], [])))
    time.sleep(0.05)
    assert reply.responses == []
    desk.calls.take(step(wire.Tokens(number, 0, [20], [], finished=finished())))
    assert reply.done.wait(120)
    assert [ids for ids, _ in reply.responses] == [list(range(21))]


def test_a_call_of_several_sequences_ends_after_the_last_of_them(desk):
    reply = Recorder(0.001)
    call = desk.open(reply, n=3, num_requests=2)
    ends = [(n, i) for n in call.routes for i in range(3)]
    for number, index in ends[:-1]:
        desk.calls.take(step(wire.Tokens(number, index, [index], [], finished=finished())))
    time.sleep(0.1)
    assert not reply.done.is_set()
    number, index = ends[-1]
    desk.calls.take(step(wire.Tokens(number, index, [index], [], finished=finished())))
    assert reply.done.wait(120)
    assert len(reply.responses) == 6
    assert reply.num_after_end == 0


def test_an_id_that_is_running_is_refused_without_harm_and_free_again_after_the_end(desk):
    first, second = Recorder(), Recorder()
    (number,) = desk.open(first, request_id="42").routes
    with pytest.raises(ContractError, match=r"ALREADY_EXISTS.*42"):
        desk.open(second, request_id="42")
    desk.calls.take(step(wire.Tokens(number, 0, [1], [], finished=finished())))
    assert first.done.wait(120)
    assert first.ids == [1]
    desk.open(second, request_id="42")


@pytest.mark.parametrize("is_step", [False, True])
def test_a_cancel_ends_the_call_and_the_engines_work_once(desk, is_step):
    reply = Recorder()
    call = desk.open(reply, num_requests=2, request_id="x", is_step=is_step)
    numbers = list(call.routes)
    before_s = time.monotonic()
    for _ in range(2):
        desk.calls.cancel(call)
    after_s = time.monotonic()
    desk.calls.end_cancelled(before_s + 0.099)  # the server may be busy with its last response
    assert not reply.done.is_set()
    desk.calls.end_cancelled(after_s + 0.1)
    desk.calls.end_cancelled(math.inf)
    assert reply.done.is_set()
    assert desk.cancelled() == [(number, wire.CancelCause.CLIENT) for number in numbers]
    desk.calls.take(step(wire.Tokens(numbers[0], 0, [1], [], finished=finished())))
    time.sleep(0.05)
    assert reply.num_after_end == 0
    assert reply.responses == []


def test_stop_lets_the_engine_end_the_call(desk):
    reply = Recorder()
    (number,) = desk.open(reply, request_id="7").routes
    desk.calls.stop("8")
    assert desk.sent == []
    desk.calls.stop("7")
    assert desk.cancelled() == [(number, wire.CancelCause.STOP)]
    end = finished(wire.FinishReason.CANCELLED)
    desk.calls.take(step(wire.Tokens(number, 0, [1], [], finished=end)))
    assert reply.done.wait(120)
    assert reply.error is None


def test_the_loss_of_the_engine_ends_every_call_with_an_error(desk):
    replies = [Recorder() for _ in range(10)]
    for reply in replies:
        desk.open(reply)
    desk.calls.lose_engine()
    for reply in replies:
        assert reply.done.is_set()
        assert reply.error.code is Code.UNAVAILABLE


def test_calls_that_are_kept_whole_outlive_the_loss_of_the_engine(desk):
    replies = [Recorder() for _ in range(3)]
    kept, torn, lost = (desk.open(reply, num_requests=2) for reply in replies)
    desk.calls.lose_engine({*kept.routes, next(iter(torn.routes))})
    assert [reply.done.is_set() for reply in replies] == [False, True, True]
    assert all(desk.calls.is_waiting_for(number) for number in kept.routes)
    assert not any(desk.calls.is_waiting_for(number) for number in [*torn.routes, *lost.routes])
    desk.calls.lose_messages([next(iter(kept.routes)), *lost.routes])
    assert str(replies[0].error).startswith("UNAVAILABLE: a message of the engine was lost")


def test_an_error_of_one_sequence_ends_its_call_alone(desk):
    reply, other = Recorder(), Recorder()
    number = next(iter(desk.open(reply, num_requests=2).routes))
    (neighbour,) = desk.open(other).routes
    end = wire.Finished(wire.FinishReason.ERROR, 1, 1, PERF, error="NaN in the logits")
    desk.calls.take(step(wire.Tokens(number, 0, [], [], finished=end)))
    assert reply.done.wait(120)
    assert str(reply.error) == "INTERNAL: NaN in the logits"
    desk.calls.reject(wire.Rejected(neighbour, "INVALID_ARGUMENT", "too long"))
    assert str(other.error) == "INVALID_ARGUMENT: too long"


def test_what_the_engine_refuses_is_not_cancelled_there_but_the_rest_of_its_call_is(desk):
    replies = [Recorder() for _ in range(2)]
    (alone,) = desk.open(replies[0]).routes
    first, second = desk.open(replies[1], num_requests=2).routes
    for number in (alone, second):
        desk.calls.reject(wire.Rejected(number, "UNAVAILABLE", "full", "max_waiting"))
    assert [str(reply.error) for reply in replies] == ["UNAVAILABLE: full"] * 2
    assert desk.cancelled() == [(first, wire.CancelCause.FAILED)]
    assert desk.calls.clients.refused["max_waiting"] == 2


def test_a_response_that_cannot_be_made_ends_the_call_with_an_error_that_tells_nothing(desk):
    reply = Recorder()
    (number,) = desk.open(reply).routes
    desk.calls.take(step(wire.Tokens(number, 0, [7777], [])))
    assert reply.done.wait(120)
    assert str(reply.error) == "INTERNAL: the response could not be made"
    assert desk.cancelled() == [(number, wire.CancelCause.FAILED)]


# --- over time ---------------------------------------------------------------------------------


def test_over_time_every_token_leaves_before_the_error(desk):
    reply = Recorder(0.05)
    (number,) = desk.open(reply).routes
    for position in range(20):
        desk.calls.take(step(wire.Tokens(number, 0, [position], [])))
    desk.calls.take(step(overdue(number, 0, [20])))
    check_overdue(reply)
    assert reply.ids == list(range(21))
    assert desk.calls.snapshot() == []


@pytest.mark.parametrize("token_ids", [[], [1]])
def test_over_time_without_a_token_or_without_streaming_the_error_is_alone(desk, token_ids):
    reply = Recorder()
    (number,) = desk.open(reply, is_streaming=not token_ids).routes
    desk.calls.take(step(overdue(number, 0, token_ids)))
    check_overdue(reply)
    assert reply.responses == []


def test_over_time_the_error_comes_after_the_tokens_of_all_sequences(desk):
    reply = Recorder(0.002)
    one, two = desk.open(reply, n=3, num_requests=2).routes
    for number in (one, two):
        desk.calls.take(step(wire.Tokens(number, 0, [number], [], finished=finished())))
    ends = [(number, index) for number in (one, two) for index in (1, 2)]
    desk.calls.take(step(*(overdue(n, i, [10 * n + i]) for n, i in ends)))
    check_overdue(reply)
    assert sorted(reply.ids) == [one, two, 11, 12, 21, 22]


ENDS = {
    "tokens": lambda desk, call, request: desk.calls.take(
        step(wire.Tokens(request, 0, [1], [], finished=finished()))
    ),
    "cancel": lambda desk, call, request: desk.calls.cancel(call),
    "error": lambda desk, call, request: desk.calls.fail(call, ContractError("planted")),
    "refusal": lambda desk, call, request: desk.calls.reject(
        wire.Rejected(request, "UNAVAILABLE", "planted")
    ),
    "loss": lambda desk, call, request: desk.calls.lose_engine(),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_of_a_call_that_has_ended_waits_to_be_collected(desk, end):
    with without_collector():
        reply = Recorder()
        call = desk.open(reply)
        kept = [weakref.ref(each) for each in (call, *call.streams, reply)]
        [request] = call.routes
        desk.calls.take(step(wire.Tokens(request, 0, [5], [])))
        ENDS[end](desk, call, request)
        desk.calls.end_cancelled(math.inf)
        assert reply.done.wait(120)
        del call, reply
        desk.senders.close()  # each of its threads keeps the last stream that it had
        assert [each() for each in kept] == [None] * 3
