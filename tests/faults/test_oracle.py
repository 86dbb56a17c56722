"""The oracle can fail: three bugs, planted in the engine, that it must see."""

import os
import signal
from collections.abc import Iterator

import pytest
from faults.oracle import Oracle, asks

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def replaced(oracle: Oracle) -> Iterator[None]:
    """The bug goes with its engine."""
    yield
    pid = oracle.client.health()["engine_pid"]
    os.kill(pid, signal.SIGKILL)
    oracle.wait_back(pid, 20)


def test_a_block_that_is_lost(oracle: Oracle) -> None:
    questions = asks(4)
    oracle.learn(questions)
    oracle.plant("leak")
    with oracle.storm(questions):
        pass
    assert any("blocks are lost" in line for line in oracle.judge())


def test_a_block_that_is_freed_early(oracle: Oracle) -> None:
    questions = asks(6, victim=True)
    oracle.learn(questions)
    oracle.plant("free_early")
    with oracle.storm(questions):
        pass
    assert any("answered" in line or "harmed" in line for line in oracle.judge())


def test_tokens_that_are_told_to_another(oracle: Oracle) -> None:
    questions = asks(6)
    oracle.learn(questions)
    oracle.plant("cross_talk")
    with oracle.storm(questions):
        pass
    assert any("answered" in line for line in oracle.judge())
