"""Faults of a running engine, on a real server: who is harmed, what is told, what is left."""

import os
import signal
import time
from collections.abc import Callable

import pytest
from fixtures.faults.asking import Ask, asks
from fixtures.faults.bounds import assert_promised
from fixtures.faults.oracle import Oracle
from fixtures.server.support import RequestError
from fixtures.waiting import wait_for

pytestmark = [pytest.mark.triton, pytest.mark.rest]

PROMISED_S = {"all told": 2.0, "all served": 5.0}  # 0.2 and 2 s with nothing else to do
# Of each time, whatever else the machine does.
ERRORS_S = 120.0
BACK_S = 90.0
STEADY_S = 6.0  # an engine that has served for 5 s is started again at once
PACE_S = 0.3  # so slow that all of a storm are there at once on any machine


def lose_engine(
    oracle: Oracle, questions: list[Ask], end: Callable[[int], None]
) -> dict[str, float]:
    """End the engine while all questions run; how soon all were told, and served by the next."""
    oracle.learn(questions)
    first = len(oracle.outcomes)
    time.sleep(STEADY_S if first else 0.0)
    oracle.plant("pace", seconds=PACE_S)
    with oracle.storm(questions, running=len(questions)):
        outcomes = oracle.outcomes[first:]
        wait_for(lambda: all(outcome.text for outcome in outcomes), 120)
        pid = oracle.client.health()["engine_pid"]
        begin = time.monotonic()
        end(pid)
        oracle.wait_back(pid, BACK_S)
        back_s = time.monotonic() - begin
    assert all(outcome.error for outcome in outcomes), outcomes
    told_s = max(outcome.ended_s for outcome in outcomes) - begin
    assert told_s < ERRORS_S
    return dict(zip(PROMISED_S, (told_s, back_s), strict=True))


def check_lost_engine(oracle: Oracle, end: Callable[[int], None], record) -> None:
    questions = asks(10)
    assert_promised(PROMISED_S, lambda: lose_engine(oracle, questions, end), record)
    with oracle.storm(questions):
        pass
    assert all(outcome.error is None for outcome in oracle.outcomes[-len(questions) :])
    assert oracle.judge("all") == []


def test_a_killed_engine(oracle: Oracle, record_property) -> None:
    check_lost_engine(oracle, lambda pid: os.kill(pid, signal.SIGKILL), record_property)


@pytest.mark.parametrize(
    "seconds", [1.5, pytest.param(30.0, marks=pytest.mark.slow)], ids=["short", "30"]
)
def test_an_engine_that_stands_still_and_goes_on(oracle: Oracle, seconds: float) -> None:
    questions = asks(10)
    oracle.learn(questions)
    oracle.plant("pace", seconds=PACE_S)
    with oracle.storm(questions, running=10):
        pid = oracle.client.health()["engine_pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(RequestError, match="UNAVAILABLE: the engine did not answer"):
                oracle.client.ask_health()
            time.sleep(seconds - 1)
        finally:
            os.kill(pid, signal.SIGCONT)
        oracle.plant("heal")
    assert oracle.client.health()["engine_pid"] == pid
    assert oracle.judge("nobody") == []


def test_requests_of_which_nothing_was_told_outlive_their_engine(oracle: Oracle) -> None:
    questions = asks(10)
    oracle.learn(questions)
    oracle.plant("stall", seconds=60.0)
    pid = oracle.client.health()["engine_pid"]
    with oracle.storm(questions):
        wait_for(lambda: oracle.num_in_flight() == len(questions), 120)
        time.sleep(0.5)  # the first is in a step, the others wait in the engine's socket
        os.kill(pid, signal.SIGKILL)
    oracle.wait_back(pid, BACK_S)
    assert oracle.judge("nobody") == []


def test_exceptions_and_short_memory_in_a_step(oracle: Oracle) -> None:
    storms = [asks(10, victim="vllm_model", is_http=True), asks(10, victim="tensorrt_llm_bls")]
    for questions in storms:  # before the faults: they last until the engine is healed
        oracle.learn(questions)
    pid = oracle.client.health()["engine_pid"]
    oracle.plant("fail_victim")
    with oracle.storm(storms[0]):
        pass
    assert oracle.judge("victims", ["INTERNAL"]) == []
    questions = storms[1]
    oracle.plant("short_memory", max_tokens=7)
    with oracle.storm(questions):
        pass
    assert oracle.judge("victims", ["INTERNAL"]) == []
    oracle.plant("pace", seconds=PACE_S)
    with oracle.storm(questions, running=11):
        oracle.plant("fail_once")  # and then no pace any more
    assert oracle.judge("nobody") == []
    assert oracle.client.health()["engine_pid"] == pid


def test_nan_in_one_row_ends_it_and_its_blocks_harm_nobody_after(oracle: Oracle) -> None:
    questions = asks(10, victim="ensemble", is_http=True)
    oracle.learn(questions)
    pid = oracle.client.health()["engine_pid"]
    oracle.plant("nan", number=5)
    with oracle.storm(questions):
        pass
    assert oracle.outcomes[-1].error is not None
    assert "numerical error" in oracle.outcomes[-1].error
    assert oracle.judge("victims", ["INTERNAL"]) == []
    # The last to be freed are the first to be used again: these prompts lie in the NaN.
    with oracle.storm(questions[:2]):
        pass
    assert oracle.judge("nobody") == []
    with oracle.storm(questions[:-1]):
        pass
    assert oracle.judge("nobody") == []
    oracle.plant("heal")
    assert oracle.client.health()["engine_pid"] == pid


@pytest.mark.slow  # as one that is killed; tests/engine has the rest
def test_a_cuda_error_that_stays_ends_the_engine_and_the_next_one_serves(
    oracle: Oracle, record_property
) -> None:
    check_lost_engine(oracle, lambda _: oracle.plant("sticky"), record_property)


def test_the_clock_jumps(oracle: Oracle) -> None:
    questions = asks(10)
    oracle.learn(questions)
    oracle.plant("pace", seconds=PACE_S)
    with oracle.storm(questions, running=10):
        oracle.plant("turn_clock", hours=1)
        oracle.plant("turn_clock", hours=-2)
        oracle.plant("heal")
    assert oracle.judge("nobody") == []


@pytest.mark.parametrize("to_engine", [False, True])
@pytest.mark.parametrize("kind", ["repeated", "unknown"])
def test_frames_that_are_repeated_or_unknown(oracle: Oracle, kind: str, to_engine: bool) -> None:
    questions = asks(10)
    oracle.learn(questions)
    oracle.plant("spoil_frames", every=2, kind=kind, to_engine=to_engine)
    with oracle.storm(questions):
        pass
    oracle.plant("mend_frames")
    assert oracle.judge("nobody") == []


@pytest.mark.parametrize("to_engine", [False, True])
def test_frames_that_are_truncated(oracle: Oracle, to_engine: bool) -> None:
    """What was in them is lost: who waits for it is told so, and nobody gets a text with a hole."""
    questions = asks(10)
    oracle.learn(questions)
    oracle.plant("spoil_frames", every=5, kind="truncated", to_engine=to_engine)
    with oracle.storm(questions):
        pass
    oracle.plant("mend_frames")
    assert any(outcome.error for outcome in oracle.outcomes)
    assert oracle.judge("all") == []
    with oracle.storm(questions):
        pass
    assert oracle.judge("nobody") == []
