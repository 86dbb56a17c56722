"""A cancel in every state, at every step: its blocks are free two steps later, others go on."""

import pytest
from fixtures.engine.checks import check, greedy
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from fixtures.engine.ticks import ticks
from slipstream.core.sequence import Sequence, SequenceStatus
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import FinishReason

# (prompt, tokens, sequences): a decode, chunks, siblings that share, one that waits. Together they
# want more than the pool has, so the youngest are preempted.
ASKED = [(2, 26, 1), (20, 12, 1), (9, 14, 3), (5, 10, 1), (30, 5, 1)]
NUM_BLOCKS, BLOCK_SIZE = 18, 4


def state(sequence: Sequence) -> str:
    if sequence.status is SequenceStatus.WAITING:
        return "preempted" if sequence.num_preemptions else "waiting"
    if sequence.num_in_flight and sequence.num_tokens == sequence.num_final:
        return "last token in flight"
    if sequence.num_computed < sequence.num_prompt:
        return f"prefill from {sequence.num_computed}"
    return "decode"


def begin(max_in_flight: int) -> Client:
    runner = CountingRunner(NUM_BLOCKS, BLOCK_SIZE, max_in_flight=max_in_flight)
    client = Client(Engine(Limits(5, 8), runner, Words(), clock=ticks()))
    for number, (length, max_tokens, n) in enumerate(ASKED):
        client.submit([number + 1] * length, greedy(max_tokens, n=n, end_ids=()))
    return client


def seen(max_in_flight: int, victim: int, num_steps: int) -> str:
    """Cancel a request after so many steps; return the status of its first sequence."""
    client = begin(max_in_flight)
    engine = client.engine
    for _ in range(num_steps):
        client.step()
    request = engine._requests.get((client.name, victim))
    if request is None:
        return "ended"
    was = state(request.sequences[0])
    held = {block for s in request.sequences for table in s.cache.tables for block in table}
    assert engine.cancel(client.name, victim)
    blocks = engine._scheduler.cache._blocks
    fenced = {block for _, block in blocks._fenced}
    idle = {block for block in range(NUM_BLOCKS) if blocks.is_idle(block)}
    copied = {
        copy.source for copies in engine._scheduler.cache._launched for copy in copies
    }  # for a sibling, by the step in flight
    assert held <= fenced | idle | copied
    fence = max((fence for fence, _ in blocks._fenced), default=0)
    for _ in range(2):
        client.step()
    assert all(later > fence for later, _ in blocks._fenced)
    assert (client.name, victim) not in engine._requests
    client.drain()
    assert blocks.num_free == NUM_BLOCKS
    for number, (length, max_tokens, n) in enumerate(ASKED):
        if number != victim:
            check(client, number, [number + 1] * length, greedy(max_tokens, n=n, end_ids=()))
    ends = {client.streams[victim, index].reason for index in range(ASKED[victim][2])}
    assert FinishReason.CANCELLED in ends
    return was


@pytest.mark.parametrize(
    ("max_in_flight", "every"),
    [
        (2, 3),
        pytest.param(1, 1, marks=pytest.mark.rest),
        pytest.param(2, 1, marks=pytest.mark.rest),
    ],
)
def test_two_steps_after_a_cancel_its_blocks_are_free(max_in_flight: int, every: int) -> None:
    states = {
        seen(max_in_flight, victim, num_steps)
        for victim in range(len(ASKED))
        for num_steps in range(victim % every, 60, every)
    }
    assert states >= {"waiting", "decode", "preempted", "prefill from 0", "ended"}
    assert sum(name.startswith("prefill") for name in states) >= 4
    assert ("last token in flight" in states) == (max_in_flight == 2)
