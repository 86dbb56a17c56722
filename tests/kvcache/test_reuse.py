"""A computed prefix is found again: across requests, turns, siblings, cancels and preemptions."""

import random

import pytest
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import VOCAB_SIZE, Words, expected
from slipstream.engine.admission import MAX_DEFERRALS
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.engine.step_draft import StepDraft
from slipstream.wire import FinishReason
from slipstream_contract.errors import ContractError
from slipstream_contract.retention import Retention, TokenRange
from slipstream_contract.sampling import SamplingParams

SIZE = 4
MAX_LEN = 200


def make(
    num_blocks: int = 64,
    num_seqs: int = 8,
    num_tokens: int = 64,
    max_in_flight: int = 2,
    is_reused: bool = True,
    long_prompt_tokens: int = 1024,
) -> tuple[Client, CountingRunner]:
    runner = CountingRunner(num_blocks, SIZE, MAX_LEN, max_in_flight)
    runner.max_tokens = num_tokens
    limits = Limits(
        num_seqs,
        num_tokens,
        kv_cache_reuse=is_reused,
        long_prompt_tokens=long_prompt_tokens,
    )
    return Client(Engine(limits, runner, Words())), runner


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n)


def check(client: Client, number: int, prompt: list[int], sampling: SamplingParams) -> None:
    for index in range(sampling.n):
        stream = client.streams[number, index]
        assert (stream.text, stream.reason) == expected(prompt, sampling, index, MAX_LEN)


def ask(client: Client, prompt: list[int], max_tokens: int = 5, **cache: object) -> tuple[int, int]:
    """Return how many blocks a request shared, and how many of its tokens were computed."""
    runner = client.engine._runner
    assert isinstance(runner, CountingRunner)
    before = len(runner.batches)
    number = client.submit(prompt, greedy(max_tokens), **cache)  # type: ignore[arg-type]
    client.drain()
    check(client, number, prompt, greedy(max_tokens))
    last = client.streams[number, 0].last
    assert last is not None
    assert last.finished is not None
    rows = [row for batch in runner.batches[before:] for row in batch.rows]
    computed = {(row.start + i) for row in rows for i in range(len(row.token_ids))}
    perf = last.finished.perf
    assert perf.kv_alloc_total_blocks == perf.kv_alloc_new_blocks + perf.kv_reused_blocks
    return perf.kv_reused_blocks, len([i for i in computed if i < len(prompt)])


def told(client: Client, number: int) -> list[int]:
    return client.streams[number, 0].token_ids


PROMPT = list(range(18))  # four blocks and a half


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_whole_blocks_are_shared_and_of_the_next_what_matches_is_copied(max_in_flight: int) -> None:
    client, runner = make(max_in_flight=max_in_flight)
    assert ask(client, PROMPT) == (0, 18)
    assert ask(client, PROMPT) == (4, 1)  # never the last token
    assert ask(client, PROMPT[:17]) == (4, 1)
    assert ask(client, PROMPT[:16]) == (3, 1)  # of the fourth block 3 tokens are copied
    assert ask(client, [*PROMPT[:10], 50, 51]) == (2, 2)  # of the third one 2
    assert ask(client, [*PROMPT[:10], 50, 51, 52]) == (3, 1)
    assert ask(client, [*PROMPT[:9], 50, 60]) == (2, 2)  # the nearest has 1, not 2 of them
    assert ask(client, [60, *PROMPT]) == (0, 19)
    copied = [copy for batch in runner.batches for copy in batch.copies]
    assert len(copied) == 4


def test_without_reuse_nothing_is_found() -> None:
    client, runner = make(is_reused=False)
    for _ in range(2):
        assert ask(client, PROMPT) == (0, 18)
    number = client.submit(PROMPT, greedy(5, n=3))
    client.drain()
    check(client, number, PROMPT, greedy(5, n=3))
    assert not any(batch.copies for batch in runner.batches)
    assert client.engine._scheduler.cache.num_cached == 0


def test_the_next_question_finds_the_last_answer() -> None:
    client, _ = make()
    turn, prompt = client.submit(PROMPT, greedy(9)), PROMPT
    for _ in range(3):
        client.drain()
        prompt = [*prompt, *told(client, turn), 7, 8]
        # All but the answer's last token, which was never computed, and the question.
        assert ask(client, prompt, 9) == ((len(prompt) - 3) // SIZE, 3)
        turn = max(number for number, _ in client.streams)


def test_what_a_cancelled_request_had_is_found() -> None:
    client, _ = make()
    number = client.submit(PROMPT, greedy(100))
    for _ in range(9):
        client.step()
    outputs = told(client, number)
    assert len(outputs) >= 6
    client.engine.cancel(client.name, number)
    client.drain()
    prompt = [*PROMPT, *outputs]
    shared, computed = ask(client, prompt)
    assert shared >= (len(prompt) - 2) // SIZE - 1
    assert computed <= 3


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    client, runner = make()
    number = client.submit(PROMPT, greedy(30))
    for _ in range(10):
        client.step()
    (victim,) = client.engine._requests[client.name, number].sequences
    num_known, before = victim.num_known, len(runner.batches)
    client.engine._scheduler._running.preempt(victim)
    client.drain()
    check(client, number, PROMPT, greedy(30))
    assert runner.batches[before].rows[0].start >= num_known - 1


def test_siblings_share_what_is_whole_and_copy_the_rest() -> None:
    client, runner = make()
    number = client.submit(PROMPT, greedy(7, n=5))
    client.drain()
    check(client, number, PROMPT, greedy(7, n=5))
    assert sum(len(batch.copies) for batch in runner.batches) == 4
    rows = [row for batch in runner.batches for row in batch.rows]
    assert sum(len(row.token_ids) for row in rows if row.start < len(PROMPT)) == 18 + 4


def test_nobody_finds_what_another_tenant_has_computed() -> None:
    client, _ = make()
    assert ask(client, PROMPT, salt="a") == (0, 18)
    assert ask(client, PROMPT, salt="b") == (0, 18)
    assert ask(client, PROMPT) == (0, 18)
    assert ask(client, PROMPT, salt="a") == (4, 1)
    with pytest.raises(ContractError, match=r"^INVALID_ARGUMENT: cache_salt has 257 bytes, at mo"):
        client.submit(PROMPT, greedy(1), salt="x" * 257)


# --- a burst -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_burst_computes_what_it_has_in_common_once(max_in_flight: int) -> None:
    client, runner = make(num_blocks=400, num_tokens=64, max_in_flight=max_in_flight)
    shared = list(range(40)) * 2
    asked = [[*shared, 50, i] for i in range(20)]
    stranger = [60, 60, 60]
    numbers = [client.submit(prompt, greedy(4)) for prompt in asked]
    other = client.submit(stranger, greedy(4))
    client.step()
    client.step()
    assert client.streams[other, 0].token_ids, "who needs something else waits for them"
    client.drain()
    for number, prompt in zip(numbers, asked, strict=True):
        check(client, number, prompt, greedy(4))
    check(client, other, stranger, greedy(4))
    rows = [row for batch in runner.batches for row in batch.rows]
    computed = sum(len(row.token_ids) for row in rows if row.start < len(shared))
    assert computed <= len(shared) + 20 * SIZE


def test_a_burst_of_long_prompts_computes_what_it_has_in_common_once() -> None:
    """Beside decodes a step computes few tokens of long prompts: prompts without a share wait."""
    client, runner = make(num_blocks=2000, num_seqs=32, num_tokens=128, long_prompt_tokens=20)
    shared = list(range(40))
    asked = [[*shared, *[50 + i % 8, i] * 30] for i in range(24)]
    numbers = [client.submit(prompt, greedy(12)) for prompt in asked]
    client.drain()
    for number, prompt in zip(numbers, asked, strict=True):
        check(client, number, prompt, greedy(12))
    rows = [row for batch in runner.batches for row in batch.rows]
    computed = sum(len(row.token_ids) for row in rows if row.start < len(shared))
    assert computed <= 4 * len(asked[0]), "by the leader, and those that a step had room for"


@pytest.mark.parametrize(("num_shared", "is_held"), [(40, True), (16, False)])
def test_a_prompt_with_little_in_common_keeps_its_place(num_shared: int, is_held: bool) -> None:
    client, _ = make(num_blocks=2000, num_seqs=32, num_tokens=128, long_prompt_tokens=20)
    prompts = [[*range(num_shared), *[50 + i % 8, i] * 30] for i in range(12)]
    numbers = [client.submit(prompt, greedy(12)) for prompt in prompts]
    requests = [client.engine._requests[client.name, number] for number in numbers]
    client.drain()
    assert any(request.sequences[0].num_deferrals for request in requests) == is_held


@pytest.mark.parametrize("way", ["cancel", "preempt", "fail", "nan"])
def test_deferred_sequences_go_on_when_the_leader_is_gone(way: str) -> None:
    client, runner = make(num_tokens=30)
    shared = list(range(40))
    first = client.submit([*shared, 50], greedy(4))
    others = [client.submit([*shared, 51, i], greedy(4)) for i in range(3)]
    (leader,) = client.engine._requests[client.name, first].sequences
    if way == "fail":
        runner.broken.add(leader.id)
    client.step()
    scheduler = client.engine._scheduler
    assert way == "fail" or scheduler.waiting.num_deferred == 3
    if way == "cancel":
        client.engine.cancel(client.name, first)
    elif way == "preempt":
        scheduler._running.preempt(leader)
    elif way == "nan":
        runner.poisoned.add(leader.id)
    if way in ("cancel", "preempt"):
        assert scheduler.waiting.num_deferred == 0
    client.drain()
    for i, number in enumerate(others):
        check(client, number, [*shared, 51, i], greedy(4))
    rows = [row for batch in runner.batches for row in batch.rows if row.sequence_id != leader.id]
    computed = sum(len(row.token_ids) for row in rows if row.start < len(shared))
    assert computed <= len(shared) + 3 * SIZE, "the next of them computes it for the others"


def test_nobody_waits_for_ever() -> None:
    """Leader after leader is cancelled: after MAX_DEFERRALS a sequence computes alone."""
    client, _ = make(num_tokens=8, max_in_flight=1, num_blocks=400)
    shared = list(range(40))
    leaders = [client.submit([*shared, 50, i], greedy(2)) for i in range(9)]
    last = client.submit([*shared, 59], greedy(2), priority=9)
    request = client.engine._requests[client.name, last]
    for leader in leaders:
        client.step()
        client.engine.cancel(client.name, leader)
        assert request.sequences[0].num_deferrals <= MAX_DEFERRALS
    client.drain()
    check(client, last, [*shared, 59], greedy(2))


def test_no_sequence_waits_for_little_of_much() -> None:
    client, _ = make(num_tokens=8, max_in_flight=1, num_blocks=400)
    client.submit(list(range(50)) * 3, greedy(2))
    client.step()
    number = client.submit([0, 1, 2, 3, 4, 5], greedy(2))
    client.step()
    assert client.engine._scheduler.waiting.num_deferred == 0
    client.drain()
    check(client, number, [0, 1, 2, 3, 4, 5], greedy(2))


# --- what may not be found ---------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_nothing_is_found_of_a_sequence_that_gave_nan(max_in_flight: int) -> None:
    client, runner = make(max_in_flight=max_in_flight, num_tokens=8)
    runner.poisoned.add(0)
    number = client.submit(PROMPT, greedy(5))
    client.drain()
    assert client.streams[number, 0].reason is FinishReason.ERROR
    assert ask(client, PROMPT) == (0, 18)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_nothing_is_found_of_what_was_found_before_it_gave_nan(
    max_in_flight: int, is_shared: bool
) -> None:
    client, runner = make(max_in_flight=max_in_flight, num_tokens=8)
    if is_shared:
        ask(client, PROMPT)
    number = client.submit(PROMPT, greedy(9))
    (sequence,) = client.engine._requests[client.name, number].sequences
    while sequence.num_outputs < 3:
        client.step()
    runner.poisoned.add(sequence.id)
    client.drain()
    assert client.streams[number, 0].reason is FinishReason.ERROR
    assert ask(client, PROMPT) == (0, 18)


def test_nothing_is_found_of_a_prompt_that_was_not_computed_to_its_end() -> None:
    """There may be a NaN in it that no sample has shown."""
    client, runner = make(max_in_flight=1, num_tokens=8)
    runner.poisoned.add(0)
    number = client.submit(PROMPT, greedy(5))
    client.step()
    client.step()
    client.engine.cancel(client.name, number)
    client.drain()
    assert ask(client, PROMPT) == (0, 18)


def test_nothing_is_found_of_a_step_that_failed() -> None:
    client, runner = make(num_tokens=8, max_in_flight=1)
    runner.broken.add(0)
    number = client.submit(PROMPT, greedy(5))
    client.drain()
    assert client.streams[number, 0].reason is FinishReason.ERROR
    assert ask(client, PROMPT) == (0, 18)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_copy_that_failed_is_made_again(is_late: bool) -> None:
    client, runner = make()
    ask(client, PROMPT)
    prompt = [*PROMPT[:14], 50]
    number = client.submit(prompt, greedy(3))
    if is_late:
        runner.late_error = ValueError("planted")
    else:
        runner.error = ValueError("planted")
    client.drain()
    check(client, number, prompt, greedy(3))
    assert sum(len(batch.copies) for batch in runner.batches) >= 2


def test_a_copy_into_released_blocks_is_not_made_and_its_source_is_free() -> None:
    client, runner = make()
    ask(client, PROMPT)
    scheduler = client.engine._scheduler
    number = client.submit([*PROMPT[:14], 50], greedy(3))
    scheduler._admission.admit_waiting(StepDraft(64, [], 0, scheduler._prefill_budget))
    assert len(scheduler.cache._copies) == 1
    client.engine.check_integrity()
    client.engine.cancel(client.name, number)
    client.engine.check_integrity()
    assert not scheduler.cache._copies
    client.drain()
    assert not any(batch.copies for batch in runner.batches)


# --- who goes first ----------------------------------------------------------------------------


def test_the_least_recently_used_blocks_go_first_and_the_last_of_a_prompt_before_its_first() -> (
    None
):
    client, _ = make(num_blocks=12)
    one, two = list(range(16)), list(range(20, 36))
    for prompt in (one, two, one):
        ask(client, prompt, 1)
    ask(client, list(range(40, 56)), 1)  # 4 blocks: the 4 that nobody has, or the last of `two`
    assert ask(client, one, 1)[0] == 3
    assert ask(client, [*two[:8], 9], 1)[0] == 2


def test_a_lower_priority_goes_first_and_a_higher_one_last() -> None:
    client, _ = make(num_blocks=12)
    one, two = list(range(16)), list(range(20, 36))
    ask(client, one, 1, retention=Retention((TokenRange(0, -1, 90),)))
    ask(client, two, 1)
    for i in range(5):
        ask(client, [50 + i] * 12, 1)
    assert ask(client, one, 1)[0] == 3
    assert ask(client, two, 1)[0] == 0


# --- trees -------------------------------------------------------------------------------------


def grow_a_tree(seed: int, is_reused: bool) -> dict[tuple[int, ...], list[int]]:
    """Run branching conversations in random order, with cancels; return prompt -> output."""
    rng = random.Random(seed)
    num_blocks, max_in_flight = rng.choice([30, 60, 200]), rng.randint(1, 2)
    client, runner = make(num_blocks, 6, rng.choice([7, 30]), max_in_flight, is_reused)
    system = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
    prompts, asked = [system], {}
    results: dict[tuple[int, ...], list[int]] = {}
    for _ in range(rng.randint(3, 9)):
        for _ in range(rng.randint(1, 4)):
            prompt = [*rng.choice(prompts), *rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 6))]
            asked[client.submit(prompt, greedy(rng.randint(1, 9)))] = prompt
        for _ in range(rng.randint(0, 4)):
            client.step()
        if rng.random() < 0.3 and (flying := sorted(client.engine._requests)):
            client.engine.cancel(*flying[0])
        if rng.random() < 0.7:
            client.drain()
            for number, prompt in asked.items():
                results.setdefault(tuple(prompt), [])
                longer = told(client, number)
                best = results[tuple(prompt)]
                short = min(len(longer), len(best))
                assert longer[:short] == best[:short]
                results[tuple(prompt)] = max(longer, best, key=len)
                prompts.append([*prompt, *longer][:120])
            asked.clear()
    client.drain()
    assert len(runner.batches) < 10_000
    return results


@pytest.mark.parametrize(
    "seeds",
    [range(25), pytest.param(range(25, 1025), marks=pytest.mark.slow)],
    ids=["25 trees", "1,000 trees"],
)
def test_trees_of_turns_give_the_same_tokens_with_reuse_and_without(seeds: range) -> None:
    for seed in seeds:
        one, two = grow_a_tree(seed, True), grow_a_tree(seed, False)
        for prompt in one.keys() & two.keys():
            short = min(len(one[prompt]), len(two[prompt]))
            assert one[prompt][:short] == two[prompt][:short]
