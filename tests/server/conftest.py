"""A real tritonserver for all tests of this folder, on a repository composed for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.server.serve_process import short_directory
from fixtures.server.support import (
    GPU_HOUR_PRICE,
    KV_CACHE_TOKENS,
    Client,
    compose,
    long_checkpoint,
    serving,
)
from slipstream_serve.server import server_directory


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    output = tmp_path_factory.mktemp("served") / "models"
    checkpoint = long_checkpoint(output.parent / "checkpoint")
    options = ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--dtype", "float32"]
    options += ["--gpu-hour-price", str(GPU_HOUR_PRICE)]
    options += ["--request-log", str(output.parent / "requests.jsonl")]
    return compose(checkpoint, output, *options)


@pytest.fixture(scope="session")
def client(repository, tmp_path_factory) -> Iterator[Client]:
    with serving(repository, tmp_path_factory.mktemp("log") / "server.log") as client:
        yield client


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder whose name leaves room for sockets."""
    with short_directory() as folder:
        yield folder


@pytest.fixture
def idle(client) -> Iterator[Client]:
    """The client; after the test every block must be free again and the server serve on."""
    yield client
    client.wait_idle(120)
    assert client.server.exit_code is None
