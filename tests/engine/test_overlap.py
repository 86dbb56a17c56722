"""A step in flight while the next is scheduled: what is launched, when it is sent, what is void."""

import pytest
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words, expected, next_token
from slipstream.core.batch import Batch, Sampled
from slipstream.core.sequence import Sequence
from slipstream.core.step_sizes import StepSizes
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import FinishReason
from slipstream_contract.sampling import SamplingParams


def make(num_blocks: int = 64, **options: int) -> tuple[Client, CountingRunner]:
    runner = CountingRunner(num_blocks, 4, **options)
    return Client(Engine(Limits(16, 32, 100), runner, Words())), runner


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]


def outputs(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for number in range(count):
        tokens.append(next_token(tokens, 0, number, set()))
    return tokens[len(prompt) :]


def ids(batch: Batch) -> list[int]:
    return [row.sequence_id for row in batch.rows]


def sequence(client: Client, number: int) -> Sequence:
    return client.engine._requests[client.name, number].sequences[0]


def test_every_step_is_told_when_it_is_done_and_none_is_in_vain() -> None:
    client, runner = make()
    number = client.submit([1, 2, 3], greedy(5))
    for told in range(1, 6):
        client.step()
        assert len(client.streams[number, 0].token_ids) == told
        assert len(runner.batches) == min(told + 1, 5)
    assert not client.engine.has_work
    assert [row.source for batch in runner.batches for row in batch.rows] == [-1, 0, 0, 0, 0]


def test_an_arrival_is_in_the_next_launch() -> None:
    client, runner = make()
    client.submit([1], greedy(20))
    client.step()
    second = client.submit([2], greedy(20))
    client.step()
    assert len(runner.batches) == 3
    assert ids(runner.batches[-1]) == [0, 1]
    client.step()
    assert len(client.streams[second, 0].token_ids) == 1


def test_a_row_behind_a_stop_token_is_void() -> None:
    client, runner = make()
    third = outputs([1, 2], 3)[2]
    number = client.submit([1, 2], greedy(20, stop_token_ids=(third,)))
    client.drain()
    assert client.streams[number, 0].reason is FinishReason.STOP
    assert len(client.streams[number, 0].token_ids) == 3
    assert len(runner.batches) == 4


def test_blocks_of_a_void_row_are_fenced_until_its_step_is_done() -> None:
    client, _ = make()
    client.submit([1, 2], greedy(20, stop_token_ids=(outputs([1, 2], 1)[0],)))
    client.step()
    blocks = client.engine._scheduler.cache
    assert (blocks.num_fenced, blocks.num_free) == (1, 63)
    assert client.engine.has_work  # the step in flight
    client.step()
    assert (blocks.num_fenced, blocks.num_free) == (0, 64)
    assert not client.engine.has_work


def test_bad_words_of_several_tokens_wait_for_the_last_token() -> None:
    client, runner = make()
    words = SamplingParams(max_tokens=8, temperature=0.0, bad_words=((3, 4), (5, 6, 7)))
    careful = client.submit([1, 2], words)
    other = client.submit([2, 3], greedy(16))
    client.drain()
    num_steps = [sum(number in ids(batch) for batch in runner.batches) for number in (0, 1)]
    assert num_steps == [8, 16]
    assert all(row.source < 0 for b in runner.batches for row in b.rows if row.sequence_id == 0)
    assert len(runner.batches) <= 17
    for number, prompt, sampling in [(careful, [1, 2], words), (other, [2, 3], greedy(16))]:
        stream = client.streams[number, 0]
        assert (stream.text, stream.reason) == expected(prompt, sampling)


def test_the_token_in_flight_of_a_preempted_sequence_counts() -> None:
    client, runner = make()
    number = client.submit([1, 2, 3], greedy(10))
    client.step()
    victim = sequence(client, number)
    assert (victim.num_outputs, victim.num_pending) == (1, 1)
    client.engine._scheduler._running.preempt(victim)
    client.engine.check_integrity()
    client.step()  # not admitted again before its token is there
    assert (victim.num_outputs, victim.num_in_flight) == (2, 0)
    assert len(runner.batches) == 2
    client.drain()
    row = runner.batches[2].rows[0]  # with its own block, of which it had proven three tokens
    assert (row.start, row.token_ids) == (3, outputs([1, 2, 3], 2))
    assert client.streams[number, 0].token_ids == outputs([1, 2, 3], 10)


def test_a_preempted_sequence_may_end_by_its_token_in_flight() -> None:
    client, _ = make()
    number = client.submit([1, 2, 3], greedy(10, stop_token_ids=(outputs([1, 2, 3], 2)[1],)))
    client.step()
    client.engine._scheduler._running.preempt(sequence(client, number))
    client.drain()
    assert client.streams[number, 0].reason is FinishReason.STOP


def test_penalties_are_counted_anew_after_a_preemption_only() -> None:
    client, runner = make()
    number = client.submit([1, 2, 3], greedy(10, presence_penalty=0.5))
    client.step()
    client.step()
    client.engine._scheduler._running.preempt(sequence(client, number))
    client.drain()
    tokens = [1, 2, 3, *outputs([1, 2, 3], 10)]
    found = [row.history for batch in runner.batches for row in batch.rows]
    assert [len(h) for h in found if h is not None] == [3, 6]
    assert all(h is None or h == tokens[: len(h)] for h in found)


def test_a_failing_launch_keeps_the_tokens_of_the_step_before() -> None:
    client, runner = make()
    number = client.submit([1, 2], greedy(10))
    client.step()
    runner.error = ValueError("planted")
    client.step()
    assert client.streams[number, 0].token_ids == outputs([1, 2], 2)
    client.drain()
    assert client.streams[number, 0].token_ids == outputs([1, 2], 10)


def test_a_step_behind_one_that_fails_late_is_void() -> None:
    client, runner = make()
    first = client.submit([1, 2], greedy(10))
    client.step()
    runner.late_error = ValueError("planted")
    client.step()  # launches the step that will fail
    second = client.submit([3], greedy(10))
    client.step()  # and one behind it
    assert not runner.in_flight
    assert client.streams[first, 0].token_ids == outputs([1, 2], 2)
    client.drain()
    assert client.streams[first, 0].token_ids == outputs([1, 2], 10)
    assert client.streams[second, 0].token_ids == outputs([3], 10)


def test_nan_ends_a_sequence_whose_next_row_is_in_flight() -> None:
    client, runner = make()
    numbers = [client.submit([5, i], greedy(10)) for i in range(3)]
    client.step()
    runner.poisoned = {1}
    client.drain()
    assert client.streams[numbers[1], 0].reason is FinishReason.ERROR
    for i in (0, 2):
        assert client.streams[numbers[i], 0].token_ids == outputs([5, i], 10)


class Late:
    """A step that starts when the one before ends, and runs beside the host."""

    def __init__(self, runner: "Timed", batch: Batch) -> None:
        runner.ready_ms = max(runner.now_ms, runner.ready_ms) + runner.device_ms
        self._runner = runner
        self._ready_ms = runner.ready_ms
        self._count = len(batch.rows)

    def wait(self) -> Sampled:
        self._runner.now_ms = max(self._runner.now_ms, self._ready_ms)
        return Sampled([7] * self._count, [0.0] * self._count, [True] * self._count)


class Timed:
    """A host and a device that share a simulated clock."""

    num_blocks, block_size, vocab_size, max_model_len, max_in_flight = 1000, 4, 61, 400, 2
    window = AttentionWindow()
    transfers = None
    attention_doubles_at = 0
    step_sizes = StepSizes()
    launch_ms, device_ms = 20, 40
    now_ms = ready_ms = 0

    def launch(self, batch: Batch) -> Late:
        self.now_ms += self.launch_ms
        return Late(self, batch)


@pytest.mark.parametrize(("max_in_flight", "step_ms"), [(1, 60), (2, 40)])
def test_the_host_works_while_the_device_does(max_in_flight: int, step_ms: int) -> None:
    runner = Timed()
    runner.max_in_flight = max_in_flight
    client = Client(Engine(Limits(4, 32, 10), runner, None))
    client.submit([1], greedy(30))
    client.step()
    client.step()
    for _ in range(20):
        begin_ms = runner.now_ms
        client.step()
        assert runner.now_ms - begin_ms == step_ms


def test_no_block_is_taken_for_a_token_that_is_the_last() -> None:
    client, _ = make()
    number = client.submit([1, 2, 3], greedy(2))
    client.drain()
    last = client.streams[number, 0].last
    assert last is not None
    assert last.finished is not None
    assert last.finished.perf.kv_alloc_total_blocks == 1


def test_only_a_step_of_the_same_sequences_continues() -> None:
    client, runner = make()
    client.submit([1], greedy(6))
    client.submit([2], greedy(12))
    client.step()
    client.step()
    client.submit([3, 4], greedy(9))
    client.drain()
    # A chunk in the fourth; the fifth has its sequence among the decodes.
    assert [b.continues for b in runner.batches[:6]] == [False, True, True, False, False, True]
    for before, batch in zip(runner.batches, runner.batches[1:], strict=False):
        if batch.continues:
            assert ids(batch) == ids(before)
            assert [row.source for row in batch.rows] == list(range(len(batch.rows)))
    assert sum(b.continues for b in runner.batches) > 5
