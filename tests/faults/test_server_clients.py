"""Clients that drop, clients that do not read, and no file descriptors left: what that costs."""

import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fixtures.faults.asking import asks
from fixtures.faults.oracle import Oracle
from fixtures.faults.rude_clients import SlowReaders, drop_many
from fixtures.server.support import Client, serving
from fixtures.waiting import wait_for

pytestmark = [pytest.mark.triton, pytest.mark.rest]

# A response that nobody reads lies in the server: its event, and what the HTTP library adds.
KIB_A_RESPONSE = 2.5
RSS_SLACK_MIB = 48.0


def rss_mib(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def check_drops(oracle: Oracle, number: int, max_growth_mib: float, record) -> None:
    client = oracle.client
    questions = asks(4)
    drop_many(client, 80)  # pools of threads and memory are filled once
    oracle.learn(questions)
    before = rss_mib(client.server.pid)
    with oracle.storm(questions):
        drop_many(client, number)
    assert oracle.judge("nobody") == []
    growth = rss_mib(client.server.pid) - before
    record("RSS growth, MiB", growth)
    assert growth < max_growth_mib


def test_clients_that_connect_and_drop(oracle: Oracle, record_property) -> None:
    check_drops(oracle, 500, 32.0, record_property)


@pytest.mark.slow
def test_10_000_clients_that_connect_and_drop(oracle: Oracle, record_property) -> None:
    check_drops(oracle, 10_000, 32.0, record_property)


def check_slow_readers(oracle: Oracle, number: int, max_tokens: int, record) -> None:
    """What is not read is kept: `max_tokens` responses a stream, and no more."""
    client = oracle.client
    questions = asks(4)
    oracle.learn(questions)
    before = rss_mib(client.server.pid)
    with SlowReaders(client, number, "ensemble", max_tokens) as readers:
        with oracle.storm(questions):
            pass
        assert [outcome.error for outcome in oracle.outcomes] == [None] * len(questions)
        client.wait_running(0, 400)  # the engine does not wait for clients that do not read
        wait_for(lambda: client.health()["waiting"] == 0, 400)
        growth = rss_mib(client.server.pid) - before
        record("RSS growth, MiB", growth)
        assert growth < number * max_tokens * KIB_A_RESPONSE / 1024 + RSS_SLACK_MIB
        wait_for(lambda: readers.num_read >= number, 120)
        with oracle.storm(questions):
            pass
    assert oracle.judge("nobody") == []


def test_slow_readers(oracle: Oracle, record_property) -> None:
    check_slow_readers(oracle, 20, 100, record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_slow_readers(roomy, tmp_path, record_property) -> None:
    with serving(roomy, tmp_path / "log") as client:
        check_slow_readers(Oracle(client, tmp_path), 200, 400, record_property)


@contextmanager
def files_left(pid: int, number: int) -> Iterator[None]:
    """A process may open so many files more, while the block runs."""
    old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = len(os.listdir(f"/proc/{pid}/fd")) + number
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, old[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, old)


def hoard(client: Client, number: int) -> list[socket.socket]:
    """Connections that ask nothing."""
    return [
        socket.create_connection(client.server.endpoints.connectable, 10) for _ in range(number)
    ]


@pytest.mark.slow
def test_files_that_run_out(oracle: Oracle) -> None:
    """Connections beyond the server's last descriptor wait, and are served afterwards."""
    client = oracle.client
    questions = asks(6)
    oracle.learn(questions)
    with ExitStack() as shortage:
        shortage.enter_context(files_left(client.server.pid, 3))
        links = hoard(client, 20)
        with oracle.storm(questions):
            time.sleep(1.5)
            for link in links:
                link.close()
            shortage.close()
    assert oracle.judge("nobody") == []


@pytest.mark.slow
def test_no_model_and_no_engine_needs_another_file(oracle: Oracle) -> None:
    client = oracle.client
    questions = asks(6)
    oracle.learn(questions)
    engine = int(client.health()["engine_pid"])
    with ExitStack() as shortage:
        for pid in client.server.stubs():
            shortage.enter_context(files_left(pid, 0))
        shortage.enter_context(files_left(engine, 1))  # with which it looks for orders
        status, told = client.post("slipstream_health/infer", {"inputs": []}, 10)
        assert status == 200 or "UNAVAILABLE: the models' processes cannot be looked at" in told
        with oracle.storm(questions):
            pass
    assert oracle.judge("nobody") == []
