"""A router and two engines, real processes: where requests go, and what a death costs."""

import os
import signal

import pytest
from fixtures.bridge.launching import wait_lost
from fixtures.bridge.replicated import Client, parent_of, stopped
from fixtures.waiting import wait_for
from slipstream import wire
from slipstream.bridge import connection
from slipstream.bridge.totals import Totals
from slipstream_contract.errors import Code, ContractError

pytestmark = pytest.mark.rest
LONG = 1_000_000  # tokens: it does not end while a test runs


def sent(client: Client) -> list[int]:
    return [each.num_requests for each in client.replicas]


def test_a_stream_is_cancelled_where_it_runs_and_its_id_is_unique_over_all(server, client):
    other = Client(server)
    assert other.connection.wait_welcome(60)
    named = {"request_id": "mine", "model": "m"}
    client.submit(1, [5, 6, 7], LONG, **named)
    wait_for(lambda: client.tokens[1])
    for number in range(2):  # either replica
        other.submit(number, [8 + number], **named)
        wait_for(lambda number=number: number in other.rejected)
        assert other.rejected[number].code == Code.ALREADY_EXISTS
    client.connection.send(wire.Cancel(1))
    wait_for(lambda: 1 in client.ended)
    assert client.ended[1].reason is wire.FinishReason.CANCELLED
    assert other.complete(7, [8], **named)
    # A bridge that leaves takes its streams along.
    other.submit(8, [1, 2], LONG)
    wait_for(lambda: other.tokens[8])
    other.connection.close()
    wait_for(lambda: client.connection.request_status(60).running == 0)


def test_an_end_on_its_way_is_not_lost(server, client, monkeypatch):
    """A bridge asks which requests there are while tokens of ended ones wait in the router."""
    monkeypatch.setattr(connection, "_PING_S", 0.001)
    monkeypatch.setattr(connection, "_POLL_MS", 1)
    asking = Client(server, max_unanswered=1 << 30)
    assert asking.connection.wait_welcome(60)
    for first in range(0, 400, 8):
        for number in range(first, first + 8):
            asking.submit(number, [number % 50, 1 + number % 7], 1 + number % 3)
        wait_for(lambda first=first: all(asking.is_over(first + i) for i in range(8)))
    assert not asking.lost
    assert not asking.rejected
    asking.connection.close()


def test_an_engine_that_dies_costs_what_it_had_begun_and_the_other_serves_on(server, client):
    prompts = {number: [number, number + 1, number + 2] for number in range(20, 28)}
    want = {number: client.complete(number, prompt) for number, prompt in prompts.items()}
    restarts = [each.num_restarts for each in client.replicas]
    streams = {100: [1, 2], 101: [3, 4]}  # one on each
    for number, prompt in streams.items():
        client.submit(number, prompt, LONG)
        wait_for(lambda number=number: client.tokens[number])
    killed, other = [each.engine_pid for each in client.replicas]
    before = sent(client)
    with stopped(parent_of(killed)):  # its supervisor, which cannot restart it
        with stopped(killed, other):
            for number, prompt in prompts.items():
                client.submit(200 + number, prompt)
            wait_for(lambda: sum(sent(client)) == sum(before) + len(prompts))
            assert sent(client)[0] > before[0]  # some have to move
            os.kill(killed, signal.SIGKILL)
        wait_for(lambda: all(client.is_over(200 + number) for number in prompts), 60)
        assert {number: client.tokens[200 + number] for number in prompts} == want
        assert client.replicas[0].num_restarts == restarts[0] + 1
        assert not client.replicas[0].is_up
    wait_for(lambda: client.is_over(100) or client.is_over(101))
    [lost] = [number for number in streams if client.is_over(number)]
    assert client.rejected[lost].code == Code.UNAVAILABLE
    assert client.rejected[lost].message == "the engine ended; try again"
    [left] = streams.keys() - {lost}
    count = len(client.tokens[left])
    wait_for(lambda: len(client.tokens[left]) > count + 10)  # it has noticed nothing
    client.connection.send(wire.Cancel(left))
    back = client.wait_up()
    assert [each.num_restarts for each in back] == [restarts[0] + 1, restarts[1]]
    assert back[1].engine_pid == other
    assert back[0].engine_pid != killed
    assert client.complete(300, prompts[20]) == want[20]


def test_a_router_that_dies_finds_the_engines_as_they_are(server, client):
    pids = [each.engine_pid for each in client.replicas]
    first = server.router
    totals = Totals()  # as the server's metrics have them
    took(client, totals)
    want = client.complete(1, [9, 9, 9])
    wait_for(lambda: took(client, totals) >= 4)
    os.kill(first, signal.SIGKILL)
    wait_lost(client.connection, first)
    welcome = client.connection.wait_welcome(180)
    assert welcome is not None
    assert welcome.engine_pid != first
    assert [each.engine_pid for each in client.wait_up()] == pids
    assert client.complete(2, [9, 9, 9]) == want
    wait_for(lambda: took(client, totals) >= 8)
    assert took(client, totals) == 8
    requests = [totals.values[f"replica:{number}:requests_total"] for number in range(2)]
    assert sum(requests) == 2
    # An engine that is replaced adds nothing but its own.
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: client.replicas[0].engine_pid != pids[0])
    client.wait_up()
    assert client.complete(3, [9, 9, 9]) == want
    wait_for(lambda: took(client, totals) >= 12)
    assert took(client, totals) == 12


def took(client: Client, totals: Totals) -> float:
    """Look at the figures; return the tokens that all engines have made since the first look."""
    totals.advance(client.connection.request_status(60, with_figures=True))
    return totals.values["output_tokens"]


def test_a_router_whose_engines_all_hang_answers_no_probe(server, client):
    pids = [each.engine_pid for each in client.replicas]
    with stopped(pids[0]):
        assert client.connection.request_status(60)  # the other answers
    with stopped(*pids):
        wait_for(lambda: not client_answers(client))
    wait_for(lambda: client_answers(client))


def client_answers(client: Client) -> bool:
    try:
        client.connection.request_status(0.5)
    except ContractError:
        return False
    return True
