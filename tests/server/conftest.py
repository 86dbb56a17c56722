"""One real tritonserver for all tests of this folder, on a repository composed for it."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from server.support import CHECKPOINT, GPU_HOUR_PRICE, KV_CACHE_TOKENS, Client, compose, start
from slipstream_compose.server import server_directory

# tritonserver 24.10 itself, in its gRPC streams under cancels; rarely.
CRASH = "Signal (11) received"
_shared: list[Client] = []


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    output = tmp_path_factory.mktemp("served") / "models"
    options = ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--dtype", "float32"]
    options += ["--gpu-hour-price", str(GPU_HOUR_PRICE)]
    options += ["--request-log", str(output.parent / "requests.jsonl")]
    return compose(CHECKPOINT, output, *options)


@pytest.fixture(scope="session")
def client(repository, tmp_path_factory) -> Iterator[Client]:
    client = Client(start(repository, tmp_path_factory.mktemp("log") / "server.log"))
    _shared.append(client)
    yield client
    _shared.remove(client)
    client.server.stop()


@pytest.fixture
def idle(client) -> Iterator[Client]:
    """The client; after the test every block must be free again and the server serve on."""
    yield client
    client.wait_idle(5)
    assert client.server.exit_code is None


def restart_if_crashed() -> bool:
    """A new server in the place of the shared one, if that has crashed by itself."""
    for client in _shared:
        server = client.server
        if CRASH not in server.log.read_text():
            continue
        warnings.warn("tritonserver crashed; the test is run once more", stacklevel=1)
        server.stop()
        client.use(start(server.repository, server.log.with_name("again-" + server.log.name)))
        return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem) -> bool:
    """A test during which the shared server crashed by itself is run once more, on a new one."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports) and restart_if_crashed():
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
