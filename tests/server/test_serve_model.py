"""`slipstream serve` on real repositories: ready means tokens; what cannot be served is named."""

import json
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from fixtures.server.serve_process import Serve, short_directory
from fixtures.server.support import KV_CACHE_TOKENS, compose, lasting, long_checkpoint
from slipstream_serve.server import repository_root, server_directory

pytestmark = [
    pytest.mark.triton,
    pytest.mark.beside,
    pytest.mark.rest,
    pytest.mark.skipif(not server_directory().is_dir(), reason="no tritonserver: make install"),
]
REPOSITORY = repository_root() / "model_repository"


def test_demo_and_its_commands_then_an_end_in_the_middle_of_a_stream(
    tmp_path: Path, scratch: Path
) -> None:
    checkpoint = long_checkpoint(tmp_path / "checkpoint")
    options = ("--kv-cache-tokens", str(KV_CACHE_TOKENS))
    serve = Serve(compose(checkpoint, tmp_path / "models", *options), scratch, "--demo")
    shown = serve.wait_ready()
    assert re.search(r"ready in [0-9.]+ s: .* KV cache of [0-9,]+ tokens .* room for ", shown)
    assert f"HTTP     http://127.0.0.1:{serve.ports[0]}" in shown
    assert f"gRPC     127.0.0.1:{serve.ports[1]}" in shown
    assert re.search(r"first token after \d+ ms, (\d+) responses", shown)
    assert re.search(r"def __init__\(self, \S", shown)
    lines = [line.strip() for line in shown.splitlines()]
    curl = next(line for line in lines if line.startswith("curl -N "))
    complete = next(line for line in lines if " complete" in line)
    health = next(line for line in lines if line.endswith(f"health --grpc-port {serve.ports[1]}"))
    for command in (curl, complete, health):
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip()

    url = serve.url("/v2/models/ensemble/generate_stream")
    with urllib.request.urlopen(url, json.dumps(lasting("ensemble")).encode()) as stream:
        assert stream.readline().startswith(b"data:")
        assert any("engine" in line for line in serve.processes())
        assert serve.end(signal.SIGTERM) < 120
    assert serve.process.returncode == 0
    serve.assert_gone()


def test_two_servers_side_by_side(tmp_path: Path, scratch: Path) -> None:
    """Neither sockets nor shared memory nor engines are shared."""
    with short_directory() as other_scratch:
        first, second = Serve(REPOSITORY, scratch), Serve(REPOSITORY, other_scratch)
        first.wait_ready()
        second.wait_ready()
        assert first.end(signal.SIGTERM) < 120
        first.assert_gone()
        body = json.dumps({"text_input": "a", "max_tokens": 2}).encode()
        with urllib.request.urlopen(second.url("/v2/models/ensemble/generate"), body) as reply:
            assert json.loads(reply.read())["text_output"]
        assert second.end(signal.SIGTERM) < 120
        second.assert_gone()
