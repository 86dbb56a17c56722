"""gRPC streams of a server that stand still are noticed, and the server is started again."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.faults.supervised import Supervision, supervised, wait_line
from fixtures.server.support import PROMPT, Client
from slipstream_client import RequestTimeoutError, SlipstreamClient
from slipstream_serve.front_end import FrontEnd
from slipstream_serve.server import server_directory
from slipstream_serve.triton import Endpoints

# Promised are 5 and 15 s (docs/faults.md): others may use this machine, too.
NOTICED_S, REPAIRED_S = 60.0, 120.0


@pytest.fixture
def supervision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervision]:
    """Run a server whose threads wait between two locks, so that a cancel soon meets them."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    monkeypatch.setenv("TRITONSERVER_DELAY_GRPC_RESPONSE", "5")  # ms
    with supervised(tmp_path) as supervision:
        yield supervision


def cancel_until_it_hangs(client: SlipstreamClient) -> None:
    for _ in range(2000):  # it took 14 to 469
        try:
            stream = client.stream(PROMPT, model="tensorrt_llm_bls", max_tokens=100, timeout_s=5)
            for _ in itertools.islice(stream, 3):
                pass
        except RequestTimeoutError:
            return
        stream.cancel()
    pytest.fail("this tritonserver takes its locks in one order")


@pytest.mark.triton
@pytest.mark.slow
def test_streams_that_stand_still_are_noticed(supervision: Supervision, record_property) -> None:
    address = supervision._server.endpoints.grpc
    with SlipstreamClient(address) as client:
        cancel_until_it_hangs(client)
        assert Client(supervision._server).generate("ensemble", text_input=PROMPT, max_tokens=1)
        begin = time.monotonic()
        command = [sys.executable, "-m", "slipstream_client.cli", "health"]
        command += ["--grpc-port", address.rpartition(":")[2]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        record_property("health", time.monotonic() - begin)
        assert done.returncode == 1
        assert "does not answer" in done.stderr
        assert time.monotonic() - begin < NOTICED_S
        begin = time.monotonic()
        with supervision.on() as lines:
            wait_line(lines, "gRPC streams of tritonserver stood still")
        record_property("repaired", time.monotonic() - begin)
        assert time.monotonic() - begin < REPAIRED_S
        assert client.complete(PROMPT, model="ensemble", timeout_s=120.0, max_tokens=2)


def test_a_server_that_never_answered_is_not_silent() -> None:
    asker = FrontEnd(Endpoints.free())
    asker._heard_s -= 100.0
    assert asker.silence_s() == 0.0
    asker._has_answered = True
    assert asker.silence_s() > 99.0
    asker.close()


@pytest.mark.parametrize("verb", ["close", "renew"])
def test_a_question_that_waits_is_called_back(verb: str) -> None:
    """Nobody listens at that port for as long as the question waits."""
    asker = FrontEnd(Endpoints.free())
    getattr(asker, verb)()
    if verb == "renew":
        asker._has_answered = True
        assert asker.silence_s() < 1.0
        asker.close()
    asker._thread.join(30)
    assert not asker._thread.is_alive()
