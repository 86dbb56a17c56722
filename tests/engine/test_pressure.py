"""Too little of everything: a cache of a tenth of demand, and more requests than are admitted."""

from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import MAX_LEN, VOCAB_SIZE, Words, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.engine.engine import Engine
from slipstream.engine.running_set import MAX_PREEMPTIONS
from slipstream.engine.scheduler import Limits
from slipstream.engine.waiting import OLDEST_EVERY
from slipstream_contract.sampling import SamplingParams

# Priority, which prompt, its tokens, tokens to generate; most go before one that is there early,
# and prompts of a kind begin alike.
arrivals = st.tuples(
    st.sampled_from([0, 0, 0, 1, 5, 9]), st.integers(1, 3), st.integers(1, 20), st.integers(1, 9)
)
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 30), st.integers(1, 3)), min_size=12, max_size=40),
    st.integers(1, 4),
    st.integers(2, 40),
    st.integers(1, 40),
    st.integers(1, 2),
    st.sampled_from([1024, 12, 2]),
)
def test_in_a_tenth_of_the_blocks_everything_completes_step_by_step(
    asked: list[tuple[list[int], int, int]],
    block_size: int,
    num_seqs: int,
    num_tokens: int,
    max_in_flight: int,
    long_prompt_tokens: int,
) -> None:
    lengths = [(n, len(prompt), min(max_tokens, MAX_LEN)) for prompt, max_tokens, n in asked]
    demand = sum(n * -(-(size + more) // block_size) for n, size, more in lengths)
    num_blocks = max(-(-MAX_LEN // block_size), demand // 10)  # one sequence must fit
    runner = CountingRunner(num_blocks, block_size, max_in_flight=max_in_flight)
    runner.max_tokens = num_tokens
    limits = Limits(num_seqs, num_tokens, 1000, long_prompt_tokens=long_prompt_tokens)
    client = Client(Engine(limits, runner, Words()))
    numbers = [client.submit(prompt, greedy(most, n)) for prompt, most, n in asked]
    sequences = [s for r in client.engine._requests.values() for s in r.sequences]
    while client.engine.has_work:
        num_computed = client.engine.num_steps
        client.step()
        assert client.engine.num_steps > num_computed or not client.engine.has_work, "no progress"
    for number, (prompt, most, n) in zip(numbers, asked, strict=True):
        for index in range(n):
            stream = client.streams[number, index]
            assert (stream.text, stream.reason) == expected(prompt, greedy(most, n), index)
    assert max(sequence.num_preemptions for sequence in sequences) <= MAX_PREEMPTIONS
    # Every step computes something, and nothing more than once for each time it was admitted.
    computed = sum(batch.num_tokens for batch in runner.batches)
    wanted = sum(n * (size + more) for n, size, more in lengths)
    assert len(runner.batches) <= computed <= (1 + MAX_PREEMPTIONS) * wanted


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.none(), arrivals, arrivals), min_size=40, max_size=120),
    st.integers(1, 3),
    st.integers(0, 10),
)
def test_nobody_starves_in_the_engine(
    events: list[tuple[int, int, int, int] | None], num_seqs: int, spare_blocks: int
) -> None:
    """Run events: None is a step, anything else a request that comes.

    With k older ones before it, a request is the 8 (k + 1)th to be admitted after its arrival at
    the latest, although some are preempted and go before all new ones; unless it waits for another
    one when its turn comes (see test_waiting.py).
    """
    runner = CountingRunner(10 + spare_blocks, 4)
    client = Client(Engine(Limits(num_seqs, 16, 1000), runner, Words()))
    order: list[int] = []  # requests in the order of their admission, as far as steps tell
    arrived: dict[int, tuple[int, int]] = {}  # admitted before it came, older ones that waited

    def step() -> None:
        firsts = [request.sequences[0] for request in client.engine._requests.values()]
        begun = [sequence for sequence in firsts if not sequence.first_scheduled_ns]
        client.step()
        admitted = [sequence for sequence in begun if sequence.first_scheduled_ns]
        for sequence in admitted:
            num_before, num_older = arrived[sequence.request.number]
            is_in_time = len(order) - num_before < OLDEST_EVERY * (num_older + 1)
            assert is_in_time or (sequence.is_due and sequence.num_deferrals)
        order.extend(sequence.request.number for sequence in admitted)

    for event in [(9, 1, 1, 1), *events]:
        if event is None:
            step()
            continue
        priority, token_id, num_prompt, max_tokens = event
        num_waiting = client.engine._scheduler.waiting.num_requests
        number = client.submit([token_id] * num_prompt, greedy(max_tokens), priority)
        arrived[number] = (len(order), num_waiting)
    while client.engine.has_work:
        step()
    assert sorted(order) == sorted(arrived)


def test_who_waits_for_a_leader_at_its_turn_goes_when_that_is_done() -> None:
    """The last to go before its turn is its leader, whose prompt takes three steps."""
    runner = CountingRunner(100, 4)
    runner.max_tokens = 16
    client = Client(Engine(Limits(2, 16, 1000), runner, Words()))
    shared = [1, 2, 3, 4] * 9
    prompts = [[10 + i] for i in range(30)]
    prompts.insert(OLDEST_EVERY - 2, [*shared, 6])
    numbers = [client.submit([*shared, 5], greedy(1), priority=9)]
    numbers += [client.submit(prompt, greedy(1), priority=0) for prompt in prompts]
    firsts = [client.engine._requests[client.name, n].sequences[0] for n in numbers]
    client.drain()
    order = sorted(firsts, key=lambda sequence: sequence.first_scheduled_ns)
    assert (firsts[0].num_deferrals, order.index(firsts[OLDEST_EVERY - 1])) == (1, OLDEST_EVERY - 2)
    assert order.index(firsts[0]) == OLDEST_EVERY  # one fits beside the leader's last tokens
