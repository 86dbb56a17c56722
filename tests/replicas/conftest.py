"""Two engines on CPUs behind a router, as a server's bridges start them."""

import json
import sys

import pytest
from fixtures.bridge.launching import CONFIG, Server
from fixtures.bridge.replicated import Client
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig

ENDLESS = {"attention_window": 32}  # streams that do not end by themselves


@pytest.fixture(scope="module")
def settings():
    """What a module's engines have beside the rest."""
    return ENDLESS


@pytest.fixture(scope="module")
def server(tmp_path_factory, settings):
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    common = {"load_format": "random", "device": "cpu", "replicas": 2, "block_size": 8}
    config = EngineConfig(checkpoint=str(folder), kv_cache_tokens=4096, **common, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_PYTHON", sys.executable)
        server = Server(folder / "run", config)
        yield server
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine and not server.router)


@pytest.fixture
def client(server):
    client = Client(server)
    assert client.connection.wait_welcome(180), server.runtime.log.read_text()
    client.wait_up()
    yield client
    client.connection.close()
