"""Queues behind a router: what waits at a replica, by which order, and what its end does to it."""

import json
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from fixtures.bridge.launching import CONFIG
from fixtures.bridge.replicated import parent_of, stopped
from fixtures.bridge.routing import Routing
from slipstream.config import EngineConfig
from slipstream_contract.errors import Code

pytestmark = pytest.mark.rest
LONG = 1_000_000  # tokens: it does not end while a test runs
PROMPT = list(range(1, 41))
GONE = "the engine ended; try again"
NUM_WAITING = 4  # at a replica, at most


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routing]:
    folder = tmp_path_factory.mktemp("queues")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sizes = {"kv_cache_tokens": 4096, "block_size": 8, "attention_window": 32}
    bounds = {"max_num_seqs": 1, "max_waiting": NUM_WAITING}
    common = {"load_format": "random", "device": "cpu"}
    config = EngineConfig(checkpoint=str(folder), **common, **sizes, **bounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_PYTHON", sys.executable)
        engines = Routing(folder / "run", config, 2)
        yield engines
        engines.close()


@pytest.fixture
def routing(engines: Routing) -> Iterator[Routing]:
    """A router whose two engines run a stream each, so that all else waits."""
    engines.wait_up()
    engines.clear()
    for first in (1, 2):
        stream = engines.submit([first, 3, 5], LONG)
        engines.wait(lambda stream=stream: engines.tokens[stream])
    assert running(engines) == [1, 1]
    yield engines
    engines.wait_up()
    for request in list(engines.open):
        engines.cancel(request)
    engines.wait(lambda: not engines.open)


def running(routing: Routing) -> list[int]:
    return [each.connection.request_status(60).running for each in routing.replicas]


def waiting(routing: Routing) -> list[int]:
    return [each.connection.request_status(60).waiting for each in routing.replicas]


def gauges(routing: Routing) -> tuple[float, float]:
    """What the metrics have, after a look at all replicas."""
    routing.router.look()
    found = routing.router.figures().gauges
    assert found["block_size"] == 8
    return found.get("running", 0.0), found.get("waiting", 0.0)


def test_priorities_hold_among_requests_of_a_replica_that_ends(routing: Routing) -> None:
    streams = list(routing.open)
    numbers = [routing.submit([10 + level, 5, 6], 3, priority=level) for level in (3, 1, 2, 0)]
    routing.wait(lambda: waiting(routing) == [2, 2])
    assert gauges(routing) == (2, 4)
    killed, _ = routing.pids
    with stopped(parent_of(killed)):  # its supervisor, which cannot restart it
        os.kill(killed, signal.SIGKILL)
        routing.wait(lambda: len(routing.rejected) == 1)
        survivor = routing.replicas[1].connection
        routing.wait(lambda: survivor.request_status(60).waiting == len(numbers))
        assert gauges(routing) == (1, len(numbers))  # of the one that is up
        [stream] = [each for each in streams if not routing.is_over(each)]
        routing.cancel(stream)
        routing.wait(lambda: all(map(routing.is_over, numbers)))
    assert list(routing.ended) == [stream, *(numbers[at] for at in (3, 1, 2, 0))]


def test_a_burst_fills_every_replica_before_one_is_refused(routing: Routing) -> None:
    """All of it goes where no long prompt waits, before that replica says that it is full."""
    with stopped(*routing.pids):
        routing.submit(PROMPT, 2)
        sent = [each.num_sent for each in routing.replicas]
        numbers = [routing.submit([7 + each, 5, 6], 2) for each in range(2 * NUM_WAITING + 1)]
        more = [each.num_sent - before for each, before in zip(routing.replicas, sent, strict=True)]
        assert sorted(more) == [0, len(numbers)]
    routing.wait(lambda: len(routing.rejected) == 2)
    assert waiting(routing) == [NUM_WAITING] * 2
    for number in routing.rejected:
        assert number in numbers
        assert routing.rejected[number].reason == "max_waiting"
        assert f"max_waiting is {NUM_WAITING}" in routing.rejected[number].message


def test_what_waits_for_an_engine_ends_in_time_and_the_engine_is_counted_once(
    routing: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [each.num_restarts for each in routing.replicas]
    first, second = routing.pids
    with stopped(parent_of(first), parent_of(second)):
        os.kill(first, signal.SIGKILL)
        routing.wait(lambda: routing.pids == [0, second])
        kept, cancelled = (routing.submit([10 + number, 5, 6], 3) for number in range(2))
        routing.wait(lambda: routing.replicas[1].connection.request_status(60).waiting == 2)
        os.kill(second, signal.SIGKILL)
        routing.wait(lambda: routing.pids == [0, 0] and len(routing.rejected) == 2)
        assert {kept, cancelled} == routing.open.keys()
        assert gauges(routing) == (0, 0)
        routing.cancel(cancelled)
        routing.look()
        assert routing.rejected[cancelled].code == Code.UNAVAILABLE
        for replica in routing.replicas:  # as if so long had passed
            monkeypatch.setattr(replica.connection, "_kept_until_s", 0.0)
        routing.wait(lambda: routing.is_over(kept))
        assert routing.rejected[kept].message == GONE
    routing.wait_up()
    assert [each.num_restarts for each in routing.replicas] == [each + 1 for each in before]
