"""`slipstream ray` on a real Ray cluster of several nodes on this machine: `make test-ray`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.server.support import CHECKPOINT, KV_CACHE_TOKENS, PROMPT, Client, compose
from fixtures.waiting import wait_for
from slipstream_serve.triton import Endpoints

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]
OPTIONS = ("--dtype", "float32", "--kv-cache-tokens", str(KV_CACHE_TOKENS))
BODY = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without a CPU for actors, and nodes with one each."""
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        yield found
    finally:
        found.shutdown()


def command(
    repository: Path, cluster: Any, endpoints: Endpoints, nodes: int, *options: str
) -> list[str]:
    return [
        *(sys.executable, "-m", "slipstream_client.cli", "ray", "--nodes", str(nodes)),
        *("--model-repository", str(repository), "--address", cluster.address, *options, "--"),
        *("--http-port", str(endpoints.http_port), "--grpc-port", str(endpoints.grpc_port)),
        *("--metrics-port", str(endpoints.metrics_port), "--openai-port", "0"),
    ]


def is_answered(client: Client) -> bool:
    try:
        return client.post("ensemble/generate", BODY)[0] == 200
    except OSError:
        return False


def test_the_text_of_one_host_and_a_node_that_is_lost(
    client: Client, cluster: Any, tmp_path: Path
) -> None:
    want = client.generate("ensemble", **BODY)["text_output"]
    repository = compose(CHECKPOINT, tmp_path / "models", *OPTIONS, "--tensor-parallel", "2")
    endpoints, log = Endpoints.free(), tmp_path / "log"
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ranked = Client(SimpleNamespace(endpoints=endpoints))
    with log.open("ab") as file:
        process = subprocess.Popen(
            command(repository, cluster, endpoints, 2), stdout=file, stderr=file
        )
    try:
        wait_for(lambda: is_answered(ranked), 300)
        assert ranked.generate("ensemble", **BODY)["text_output"] == want
        cluster.add_node(num_cpus=1)  # there is room for what is placed again
        cluster.remove_node(nodes[0], allow_graceful=False)
        wait_for(lambda: "a node is lost" in log.read_text(), 120)
        wait_for(lambda: is_answered(ranked), 300)
        assert ranked.generate("ensemble", **BODY)["text_output"] == want
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
        assert not is_answered(ranked)
        wait_for(lambda: not left_of(repository), 30)
    finally:
        process.kill()
        process.wait()


def left_of(repository: Path) -> list[int]:
    """Processes whose command names a repository."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(repository).encode() in line:
                found.append(int(entry.name))
    return found


def test_a_cluster_without_room_is_told_apart(cluster: Any, tmp_path: Path) -> None:
    split = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
    repository = compose(CHECKPOINT, tmp_path / "models", *OPTIONS, *split)
    done = subprocess.run(
        command(repository, cluster, Endpoints.free(), 4, "--placement-timeout", "2"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "no 4 nodes with {'CPU': 1} free each within 2 s" in done.stderr
