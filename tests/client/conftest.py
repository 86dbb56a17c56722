"""Fixtures of the client's tests."""

import socket
from collections.abc import Iterator

import pytest
from fixtures.client.triton import Triton, start


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def served() -> Iterator[tuple[Triton, str]]:
    """A model that answers, and its address."""
    triton, server, url = start()
    yield triton, url
    server.stop(grace=None).wait(120)
