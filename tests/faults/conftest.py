"""A tritonserver whose engine takes orders for faults, and the oracle that judges them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.faults.asking import Ask
from fixtures.faults.oracle import Oracle
from fixtures.faults.planter import write_python
from fixtures.server.support import CHECKPOINT, Client, compose, end, long_checkpoint, start
from slipstream_serve.server import server_directory


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    """The server, and the folder for orders. Its engine is fp32 on the CPU, its cache small."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    folder = tmp_path_factory.mktemp("planted")
    orders = folder / "orders"
    orders.mkdir()
    write_python(folder / "python", orders)
    options = ["--kv-cache-tokens", "2048", "--dtype", "float32"]
    repository = compose(CHECKPOINT, folder / "models", *options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_PYTHON", str(folder / "python"))
        server = start(repository, folder / "server.log")
    try:
        yield Client(server), orders
    finally:
        end(server)


@pytest.fixture(scope="session")
def references() -> dict[Ask, str]:
    """Answers that are known to all tests on that server."""
    return {}


@pytest.fixture
def oracle(planted: tuple[Client, Path], references: dict[Ask, str]) -> Iterator[Oracle]:
    """A judge of its own for every test; no order is left behind."""
    client, orders = planted
    yield Oracle(client, orders, references=references)
    for order in orders.iterdir():
        os.unlink(order)


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose cache has room for hundreds of streams."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    output = tmp_path_factory.mktemp("roomy") / "models"
    checkpoint = long_checkpoint(output.parent / "checkpoint")
    return compose(checkpoint, output, "--kv-cache-tokens", "262144", "--dtype", "float32")
