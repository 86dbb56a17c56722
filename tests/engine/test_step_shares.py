"""Decodes of a pipeline: each step in flight has a share of its own."""

from fixtures.engine.checks import greedy
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from hypothesis import given
from hypothesis import strategies as st
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits


@given(st.integers(2, 4), st.integers(1, 9))
def test_steps_in_flight_have_no_sequence_twice_and_even_shares(
    num_stages: int, num_streams: int
) -> None:
    runner = CountingRunner(400, 4, max_in_flight=num_stages)
    client = Client(Engine(Limits(64, 64, num_stages=num_stages), runner, Words()))
    for i in range(num_streams):
        client.submit([i, 1, 2], greedy(12))
    most = 0
    while client.engine.has_work:
        client.step()
        steps = [step.batch for step in runner.in_flight]
        decodes = [row.sequence_id for batch in steps for row in batch.rows if row.samples]
        assert len(decodes) == len(set(decodes))
        most = max(most, len(decodes))
    # Every row but those of the step that has just been committed is in flight at some time.
    assert most >= num_streams - -(-num_streams // num_stages)
    for batch in runner.batches:
        assert all(row.source < 0 for row in batch.rows)
        assert batch.num_decodes <= -(-num_streams // num_stages)


def test_no_step_is_launched_behind_one_that_failed() -> None:
    runner = CountingRunner(400, 4, max_in_flight=4)
    client = Client(Engine(Limits(64, 4, num_stages=4), runner, Words()))
    client.submit(list(range(36)), greedy(3))  # its chunks follow each other
    client.step()
    num_ahead = len(runner.in_flight)
    runner.error = ValueError("planted")
    client.step()
    num_launched = len(runner.batches)
    for _ in range(num_ahead - 1):
        client.step()
        assert len(runner.batches) == num_launched
    client.drain()
    assert len(runner.batches) > num_launched
