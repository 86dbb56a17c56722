"""The oracle can fail: three bugs, planted in the engine, that it must see."""

import contextlib
import os
import signal

import pytest
from fixtures.faults.asking import asks
from fixtures.faults.oracle import SETTLE_S, Oracle

pytestmark = [pytest.mark.triton, pytest.mark.rest]


def test_three_bugs_are_seen(oracle: Oracle) -> None:
    questions = asks(10, victim="tensorrt_llm")
    oracle.learn(questions)
    pid = oracle.client.health()["engine_pid"]
    with oracle.storm(questions):
        pass
    assert oracle.judge() == []
    seen: dict[str, list[str]] = {}
    for bug, settle_s in (("cross_talk", SETTLE_S), ("lose_block", 1.0), ("free_early", 1.0)):
        oracle.plant(bug)
        with oracle.storm(questions):
            pass
        seen[bug] = oracle.judge(settle_s=settle_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # the bugs go with their engine, if that has not ended by them
    oracle.wait_back(pid, 90)
    wrong = [line for line in seen["cross_talk"] if "answered" in line]
    assert len(wrong) >= 2, seen
    assert len(wrong) == len(seen["cross_talk"]), seen
    assert any("blocks are lost" in line for line in seen["lose_block"]), seen
    # Two who write to one block: wrong tokens, or the engine ends when it is freed for the second
    # time, and with it everybody.
    assert any("answered" in line or "harmed" in line for line in seen["free_early"]), seen
