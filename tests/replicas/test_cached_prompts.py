"""Requests go where their prompts are cached: a router and two engines, real processes."""

import pytest
from fixtures.bridge.replicated import Client, stopped
from fixtures.waiting import wait_for
from slipstream import wire

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def settings():
    return {"adapter_root": ""}


def figures(client: Client) -> wire.Figures:
    found = client.connection.request_status(60, with_figures=True).figures
    assert found is not None
    return found


def sent(client: Client) -> list[int]:
    return [each.num_requests for each in client.replicas]


def test_a_prompt_goes_where_it_is_cached_and_new_ones_take_turns(server, client):
    assert client.connection.wait_welcome(0).engine_pid == server.router
    pids = [each.engine_pid for each in client.replicas]
    assert len({*pids, server.router}) == 3
    before = sent(client)
    texts = [client.complete(number, [number + 1] * 10) for number in range(4)]
    assert all(len(text) == 4 for text in texts)
    assert [now - then for now, then in zip(sent(client), before, strict=True)] == [2, 2]
    prompt = list(range(2, 26))
    first = client.complete(10, prompt)
    # An engine publishes its blocks before it answers a ping of the router. 5 texts of 4 tokens.
    wait_for(lambda: client.connection.request_status(60).num_output_tokens >= 20)
    before = sent(client)
    assert [client.complete(11 + number, prompt) for number in range(3)] == [first] * 3
    assert sorted(now - then for now, then in zip(sent(client), before, strict=True)) == [0, 3]
    wait_for(lambda: client.connection.request_status(60).num_prefix_hits >= 3 * 16)
    assert figures(client).gauges["block_size"] == 8
    wait_for(lambda: figures(client).counters["finished:length"] >= 8)


def test_a_burst_of_one_prompt_meets_where_the_first_one_went(server, client):
    """Though no engine has published it yet: both are stopped while the requests come."""
    client.complete(100, list(range(30, 40)))
    prompt = [7, 8, 9] * 8
    before = sent(client)
    with stopped(*[each.engine_pid for each in client.replicas]):
        for number in range(101, 105):
            client.submit(number, prompt)
        wait_for(lambda: router_has(client, before, 4))
    wait_for(lambda: all(client.is_over(number) for number in range(101, 105)))
    assert {tuple(client.tokens[number]) for number in range(101, 105)} == {
        tuple(client.tokens[101])
    }
    assert sorted(now - then for now, then in zip(sent(client), before, strict=True)) == [0, 4]
    shares = [client.complete(110 + number, [number, 48] * 12) for number in range(4)]
    assert len(shares) == 4


def router_has(client: Client, before: list[int], number: int) -> bool:
    return sum(sent(client)) - sum(before) == number
