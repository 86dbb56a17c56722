"""The choice of a replica: properties over drawn views."""

from hypothesis import given
from hypothesis import strategies as st
from slipstream.replicas.policy import OWN_WEIGHT, STREAM_TOKENS, View, choose, cost, has_room

views = st.builds(
    View,
    num_cached=st.integers(0, 5000),
    num_queued=st.integers(0, 50_000),
    num_held=st.integers(0, 50_000),
    num_room=st.integers(1000, 60_000),
    num_streams=st.integers(0, 300),
    num_sent=st.integers(0, 1000),
    is_full=st.booleans(),
)
groups = st.dictionaries(st.integers(0, 63), views, min_size=1, max_size=8)
prompts = st.integers(1, 5000)


def rank(view: View, num_prompt: int) -> int:
    return 2 if view.is_full else 0 if has_room(view, num_prompt) else 1


@given(groups, prompts)
def test_nothing_that_has_room_is_cheaper(found, num_prompt):
    chosen = found[choose(found, num_prompt)]
    best = min(rank(view, num_prompt) for view in found.values())
    assert rank(chosen, num_prompt) == best
    for view in found.values():
        if rank(view, num_prompt) == best:
            assert cost(chosen, num_prompt) <= cost(view, num_prompt)


@given(groups, prompts)
def test_a_full_replica_gets_nothing_while_another_is_not(found, num_prompt):
    if any(not view.is_full for view in found.values()):
        assert not found[choose(found, num_prompt)].is_full


@given(groups, prompts)
def test_more_of_the_prompt_in_its_cache_never_loses_a_request(found, num_prompt):
    number = choose(found, num_prompt)
    more = found[number]._replace(num_cached=found[number].num_cached + 500)
    assert choose({**found, number: more}, num_prompt) == number


@given(groups, prompts)
def test_more_work_never_wins_a_request(found, num_prompt):
    number = choose(found, num_prompt)
    for other in found.keys() - {number}:
        busier = found[other]._replace(num_queued=found[other].num_queued + 100)
        assert choose({**found, other: busier}, num_prompt) == number


@given(st.integers(2, 8), st.integers(1, 4000), st.integers(1, 300))
def test_a_prefix_that_all_have_in_common_overloads_no_replica(count, num_prompt, num_requests):
    """The replica that alone has a prompt is never behind by more than twice what it saves."""
    queued = [0] * count
    for _ in range(num_requests):
        found = {
            number: View(num_cached=num_prompt if number == 0 else 0, num_queued=queued[number])
            for number in range(count)
        }
        number = choose(found, num_prompt)
        queued[number] += 1 if number == 0 else num_prompt
    assert max(queued) - min(queued) <= OWN_WEIGHT * num_prompt


@given(st.integers(2, 8), st.integers(1, 100))
def test_equal_replicas_take_turns(count, num_requests):
    streams, sent = [0] * count, [0] * count
    for _ in range(num_requests):
        found = {n: View(num_streams=streams[n], num_sent=sent[n]) for n in range(count)}
        number = choose(found, 100)
        streams[number] += 1
        sent[number] += 1
    assert max(sent) - min(sent) <= 1


def test_a_prefix_is_worth_its_tokens_and_a_stream_its_price():
    holder = View(num_cached=320, num_streams=OWN_WEIGHT * 320 // STREAM_TOKENS)
    assert choose({0: View(num_sent=1), 1: holder}, 400) == 0  # equal: fewer streams
    assert choose({0: View(), 1: holder._replace(num_cached=321)}, 400) == 1
    assert choose({}, 400) is None
