"""Fixtures of the client's tests."""

from collections.abc import Iterator

import pytest
from fixtures.client.triton import Triton, start
from fixtures.ports import held_port


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nobody listens on."""
    with held_port() as port:
        yield port


@pytest.fixture
def served() -> Iterator[tuple[Triton, str]]:
    """A model that answers, and its address."""
    triton, server, url = start()
    yield triton, url
    server.stop(grace=None).wait(120)
