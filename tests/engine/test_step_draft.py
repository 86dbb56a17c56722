"""How prompts share a step: in due order, within the target, none overtaken for long."""

from types import SimpleNamespace

import pytest
from fixtures.engine.client import Client
from fixtures.engine.hashed import Words
from fixtures.engine.timed import H200, MS, Costs, TimedRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.step_sizes import StepSizes
from slipstream.engine.engine import Engine
from slipstream.engine.prefill_budget import PrefillBudget
from slipstream.engine.scheduler import Limits
from slipstream.engine.step_draft import STRETCH, StepDraft
from slipstream.runner.graphs import Buckets
from slipstream_contract.sampling import SamplingParams

DECODE_NS, TOKEN_NS = 5 * MS, 20_000
NOW_NS = 1000 * MS
SMALL = Costs(3.7, 0.021, 1000 / 42_000, 2, 2048, 4096)


def measured(target_ns: int = 0, sizes: StepSizes | None = None) -> PrefillBudget:
    """Return a budget that has measured decodes and tokens; its clock stands at `NOW_NS`."""
    now_ns = 0
    budget = PrefillBudget(lambda: now_ns, 0, target_ns, None, sizes or StepSizes())
    for num_decodes, num_tokens, took_ns in ((4, 0, DECODE_NS), (0, 1000, 1000 * TOKEN_NS)):
        budget.start_step(num_decodes, num_tokens)
        now_ns += took_ns
        budget.finish_step()
    now_ns = NOW_NS
    return budget


@st.composite
def prompts(draw: st.DrawFn) -> list[SimpleNamespace]:
    """Draw prompts that were queued within the last 200 ms."""
    many = []
    for number in range(draw(st.integers(1, 12))):
        num_tokens = draw(st.one_of(st.integers(2, 300), st.integers(2, 12_000)))
        num_scheduled = draw(st.integers(0, num_tokens - 1))
        priority = draw(st.sampled_from([5, 5, 5, 0, 9]))
        many.append(
            SimpleNamespace(
                id=number,
                num_tokens=num_tokens,
                num_scheduled=num_scheduled,
                cache=SimpleNamespace(capacity=num_tokens),
                queued_ns=NOW_NS - draw(st.integers(0, 200)) * MS,
                request=SimpleNamespace(message=SimpleNamespace(priority=priority)),
            )
        )
    return many


@settings(max_examples=150, deadline=None, derandomize=True)
@given(prompts(), st.integers(0, 3000), st.booleans(), st.sampled_from([0, 8 * MS, 60 * MS]))
def test_shares_of_a_step(many, budget, has_decodes, target_ns):
    shared = measured(target_ns)
    decodes = [SimpleNamespace()] if has_decodes else []
    draft = StepDraft(budget, list(decodes), 1, shared)
    for each in many:
        had_room, before = draft.has_room_for(each), {c.id: n for c, n in draft._grants()}
        draft.offer(each)
        grants = {c.id: n for c, n in draft._grants()}
        if not shared.is_long(each.num_tokens):
            assert had_room == bool(grants.get(each.id)), "room that is none, or room not seen"
        if budget and not before:
            assert had_room
    draft.fill()
    got = {sequence.id: size for sequence, size in draft.chunks}
    got |= {sequence.id: 1 for sequence in draft.decodes[len(decodes) :]}
    assert sum(got.values()) == budget - draft.budget <= budget
    brief = [each for each in many if not shared.is_long(each.num_tokens)]
    left = {each.id: each.num_tokens - each.num_scheduled for each in many}
    overdue = [p for p in brief if shared.is_overdue(p.queued_ns, shared.work_ns(p.num_tokens))]
    if has_decodes and not overdue:
        took_ns = DECODE_NS + sum(got.values()) * TOKEN_NS
        assert took_ns <= max(shared.target_ns, DECODE_NS + 4 * TOKEN_NS)
    longs = sum(got.get(each.id, 0) for each in many if shared.is_long(each.num_tokens))
    if has_decodes:
        assert longs * TOKEN_NS <= 0.75 * DECODE_NS
    # In due order: after one that did not get all, no other gets any.
    order = sorted(brief, key=lambda each: (draft.due_ns(each), each.id))
    is_short = [got.get(each.id, 0) < left[each.id] for each in order]
    if True in is_short:
        assert not any(got.get(each.id) for each in order[is_short.index(True) + 1 :])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(prompts(), st.integers(8, 60), st.integers(1, 3000), st.integers(1, 300))
def test_prompts_fill_the_rows_of_a_step_alone_if_more_wait(many, target_ms, budget, num_decodes):
    """Nothing is overdue, so that the target counts; a prompt that fits is not cut."""
    sizes = Buckets(256, 4096).sizes
    shared = measured(target_ms * MS, sizes)
    draft = StepDraft(budget, [SimpleNamespace()] * num_decodes, 0, shared)
    many = [each for each in many if not shared.is_long(each.num_tokens)]
    for each in many:
        each.queued_ns = NOW_NS
        draft.offer(each)
    draft.fill()
    got, asked = budget - draft.budget, sum(each.num_tokens - each.num_scheduled for each in many)
    room = min(budget, shared.room(num_decodes))
    filled = min(budget, sizes.filled(num_decodes, room)) if room < budget else room
    assert got == (asked if asked <= room else min(asked, filled))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(prompts())
def test_a_prompt_is_overtaken_only_by_those_that_come_soon_after_it(many):
    shared = measured()
    draft = StepDraft(2048, [], 0, shared)
    for one in many:
        work_ns = shared.work_ns(one.num_tokens - one.num_scheduled)
        for other in many:
            if draft.due_ns(other) < draft.due_ns(one):
                levels = one.request.message.priority - other.request.message.priority
                bound_ns = STRETCH * (work_ns + max(0, levels) * shared.longest_ns)
                assert other.queued_ns < one.queued_ns + bound_ns


def engine_of(costs: Costs, **more: object) -> tuple[Client, TimedRunner]:
    runner = TimedRunner(costs)
    limits = Limits(64, costs.budget, kv_cache_reuse=False, **more)
    return Client(Engine(limits, runner, Words(), clock=runner.clock)), runner


def ask(client: Client, num_tokens: int, max_tokens: int, priority: int = 5) -> int:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return client.submit([7] * num_tokens, sampling, priority)


def step(client: Client) -> None:
    for tokens in client.engine.step().get(client.name, ()):
        client.streams[tokens.request, tokens.index].take(tokens)


@pytest.mark.parametrize(("priority", "others"), [(5, 5), (9, 5), (9, 0)])
def test_no_prompt_starves_beside_short_ones_without_end(priority, others):
    client, runner = engine_of(SMALL)
    ask(client, 16, 400)
    for _ in range(20):
        step(client)
    begun_ns = runner.now_ns
    number = ask(client, 3000, 1, priority)
    while not client.streams[number, 0].token_ids:
        ask(client, 500, 1, others)  # more than a step has room for
        step(client)
        ask(client, 400, 1, others)
        work_ns = 3000 * SMALL.token * MS
        waited_ns = runner.now_ns - begun_ns
        levels_ns = (priority - others) * 32 * 4 * MS
        # Those before it take no longer than it is overtaken, at the rate of steps.
        assert waited_ns < 4 * STRETCH * (work_ns + levels_ns)


def test_a_short_prompt_does_not_wait_for_a_longer_one_before_it():
    client, _ = engine_of(SMALL, target_itl_ns=15 * MS)
    ask(client, 16, 400)
    ask(client, 700, 1)
    for _ in range(20):
        step(client)
    long, short = ask(client, 2500, 1), ask(client, 100, 1)
    while not client.streams[short, 0].token_ids:
        step(client)
    assert not client.streams[long, 0].token_ids
    client.drain()


@pytest.mark.rest
@pytest.mark.parametrize("target_ms", [8, 20])
def test_steps_with_streams_keep_the_target(target_ms):
    client, runner = engine_of(SMALL, target_itl_ns=target_ms * MS)
    for _ in range(4):
        ask(client, 16, 400)
    ask(client, 700, 1)
    for _ in range(20):
        step(client)
    num_before = len(runner.batches)
    number = ask(client, 2000, 1)
    while not client.streams[number, 0].token_ids:
        step(client)
    for batch in runner.batches[num_before:]:
        rows = batch.rows[batch.num_decodes :]
        took = SMALL.of(batch.num_decodes, [(row.start, len(row.token_ids)) for row in rows])
        assert took <= 1.1 * target_ms
    client.drain()


def test_where_nothing_streams_a_prompt_takes_whole_steps():
    client, runner = engine_of(SMALL, target_itl_ns=5 * MS)
    ask(client, 2 * SMALL.budget, 1)
    client.drain()
    assert [batch.num_tokens for batch in runner.batches] == [SMALL.budget] * 2


def test_more_prompts_than_the_target_has_room_for_get_whole_steps():
    client, runner = engine_of(SMALL, target_itl_ns=5 * MS)
    ask(client, 16, 100)
    ask(client, 700, 1)
    for _ in range(20):
        step(client)
    for _ in range(12):
        ask(client, 400, 2)
    client.drain()
    assert max(batch.num_tokens for batch in runner.batches[20:]) == SMALL.budget


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.floats(0.01, 0.05),
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0, 0, 20, 300, 1500])), max_size=30),
)
def test_a_step_never_ends_before_its_earliest_end(token, steps):
    """On a device where no token costs less than in larger steps."""
    now_ns = 0
    budget = PrefillBudget(lambda: now_ns)
    costs = Costs(3.7, 0.021, token, 2, 2048, 4096)
    for num_decodes, num_tokens in steps:
        budget.start_step(num_decodes, num_tokens)
        end_ns = now_ns + costs.of(num_decodes, [(0, num_tokens)] if num_tokens else []) * MS
        assert budget.earliest_end_ns() <= end_ns * 1.000001
        now_ns = int(end_ns)
        budget.finish_step()


def test_a_request_that_comes_while_a_step_runs_is_in_the_next_one():
    costs = Costs(8.0, 0.0, H200.token, 2, 2048, 4096)
    client, runner = engine_of(costs)
    ask(client, 700, 200)
    for _ in range(20):
        step(client)
    slack_ns = client.engine.slack_ns()
    assert 5 * MS < slack_ns < 8 * MS
    runner.now_ns += int(slack_ns) - 1
    number = ask(client, 16, 1)
    num_before = len(runner.batches)
    assert client.engine.slack_ns() <= 1
    step(client)
    assert len(runner.batches[num_before].rows) == 2
    step(client)
    assert client.streams[number, 0].token_ids
    client.drain()
    assert client.engine.slack_ns() == 0
