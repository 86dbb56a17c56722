"""No room left: /dev/shm, and the disk of log and runtime directory. Small ones, mounted for it."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.faults.asking import asks
from fixtures.faults.oracle import Oracle
from fixtures.server.serve_process import Serve, short_directory
from fixtures.server.support import Client, RequestError
from slipstream_serve.triton import Endpoints

pytestmark = [pytest.mark.triton, pytest.mark.slow]

MAX_MIB = 64  # a test that would fill anything larger has the wrong one


def may_mount(*command: str) -> bool:
    done = subprocess.run([*command], capture_output=True, check=False)
    return done.returncode == 0


def fill(folder: Path) -> Path:
    """Leave no room where the folder is."""
    state = os.statvfs(folder)
    assert state.f_blocks * state.f_frsize <= MAX_MIB << 20
    file = folder / "fill"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(512))
    except OSError:
        return file
    finally:
        os.close(descriptor)


@contextmanager
def disk(folder: Path, size: str) -> Iterator[None]:
    if not may_mount("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)):
        pytest.skip("may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def client_of(serve: Serve) -> Client:
    return Client(SimpleNamespace(endpoints=Endpoints(*serve.ports)))


def assert_all_served(oracle: Oracle) -> None:
    with oracle.storm(oracle.references):
        pass
    for outcome in oracle.outcomes:
        assert outcome.error is None, outcome
        assert outcome.text == oracle.references[outcome.ask]
    oracle.outcomes.clear()


def learn(oracle: Oracle) -> None:
    for outcome in oracle._run(asks(8)):
        assert outcome.error is None, outcome
        oracle.references[outcome.ask] = outcome.text


def test_a_full_disk(roomy: Path, tmp_path: Path) -> None:
    """Log, runtime directory: all of it. What dies meanwhile is started again, too."""
    with short_directory() as scratch, disk(scratch, "3m"):
        serve = Serve(roomy, scratch)
        serve.wait_ready()
        client = client_of(serve)
        oracle = Oracle(client, tmp_path)
        learn(oracle)
        file = fill(scratch)
        assert_all_served(oracle)
        os.kill(serve.pid("slipstream.engine.process"), signal.SIGKILL)
        wait_served(client)
        for _ in range(3):
            os.kill(serve.pid(" tensorrt_llm_bls_0_0"), signal.SIGKILL)
            serve.wait_line("loaded tensorrt_llm_bls again")
        assert_all_served(oracle)
        file.unlink()
        assert_all_served(oracle)
        assert serve.end(signal.SIGTERM) < 10
        assert serve.process.returncode == 0
        serve.assert_gone()


def wait_served(client: Client) -> None:
    begin = time.monotonic()
    while True:
        try:
            client.generate("ensemble", text_input="a", max_tokens=1)
            return
        except (RequestError, OSError):
            assert time.monotonic() - begin < 120
            time.sleep(0.1)


def test_a_full_shared_memory(roomy: Path, tmp_path: Path) -> None:
    """What fits into what the models have is served, what needs more is refused."""
    if not may_mount("unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"):
        pytest.skip("may not mount")
    free = Endpoints.free()
    words = [sys.executable, "-m", "slipstream_client.cli", "serve", "--log-file", tmp_path / "log"]
    words += ["--model-repository", roomy, "--http-port", free.http_port]
    words += [
        "--grpc-port",
        free.grpc_port,
        "--metrics-port",
        free.metrics_port,
        "--openai-port",
        0,
    ]
    command = f"mount -t tmpfs -o size=40m tmpfs /dev/shm && exec {shlex.join(map(str, words))}"
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("Ctrl-C"):
            assert process.poll() is None
        oracle = Oracle(Client(SimpleNamespace(endpoints=free)), tmp_path)
        learn(oracle)
        file = fill(Path("/proc", str(process.pid), "root", "dev", "shm"))
        with oracle.storm(oracle.references):
            for model in ("ensemble", "tensorrt_llm_bls"):
                with pytest.raises(RequestError, match="No space left on device"):
                    oracle.client.generate(model, text_input="a" * (3 << 20), max_tokens=4)
        assert_all_served(oracle)
        file.unlink()
        with pytest.raises(RequestError, match="INVALID_ARGUMENT: text_input has"):
            oracle.client.generate("ensemble", text_input="a" * (3 << 20), max_tokens=4)
        assert_all_served(oracle)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
