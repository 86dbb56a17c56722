"""A server that is told to end while a hundred streams run: `slipstream serve`, and one alone."""

import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from server.serve_process import Serve, short_directory
from server.support import PROMPT, Client, RequestError, start
from slipstream_compose.triton import SHARED_MEMORY, Endpoints

pytestmark = pytest.mark.triton

NUM_STREAMS = 100
MODELS = ("ensemble", "tensorrt_llm_bls")


class Streams:
    """So many, of these models in turn, each far too long to end by itself."""

    def __init__(self, client: Client, number: int, models: tuple[str, ...]) -> None:
        self.errors: list[str] = []
        self.num_begun = 0
        self._client = client
        self._models = models
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True)
            for index in range(number)
        ]
        for thread in self._threads:
            thread.start()
        begin = time.monotonic()
        while self.num_begun < number:
            assert time.monotonic() - begin < 120, (self.num_begun, self.errors[:3])
            time.sleep(0.05)

    def _run(self, index: int) -> None:
        model = self._models[index % len(self._models)]
        request = {"text_input": PROMPT, "max_tokens": 1900, "end_id": -1, "stream": True}
        is_begun = False
        try:
            for _ in self._client.iterate(model, timeout_s=60, **request):
                with self._lock:
                    self.num_begun += not is_begun
                is_begun = True
            self.errors.append("ended by itself")
        except RequestError as error:
            self.errors.append(str(error))
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def assert_told(self) -> None:
        """Each has had one error that says why."""
        deadline = time.monotonic() + 60
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert len(self.errors) == len(self._threads)
        unclear = [
            text for text in self.errors if "UNAVAILABLE: the server is stopping" not in text
        ]
        assert unclear == []


def wait_not_ready(http: str, timeout_s: float) -> None:
    begin = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{http}/v2/health/ready", timeout=5):
                pass
        except (urllib.error.URLError, OSError):
            return
        assert time.monotonic() - begin < timeout_s
        time.sleep(0.02)


def test_slipstream_serve_with_100_streams(roomy: Path) -> None:
    with short_directory() as scratch:
        serve = Serve(roomy, scratch)
        serve.wait_ready()
        client = Client(SimpleNamespace(endpoints=Endpoints(*serve.ports)))
        streams = Streams(client, NUM_STREAMS, MODELS)
        serve.process.send_signal(signal.SIGTERM)
        wait_not_ready(client.http, 30)
        streams.assert_told()
        serve.process.wait(60)
        assert serve.process.returncode == 0
        serve.assert_gone()


@pytest.mark.slow
def test_a_tritonserver_alone_with_100_streams(roomy: Path, tmp_path: Path) -> None:
    """Of one model; streams of a true ensemble hang where Triton refuses their next step."""
    server = start(roomy, tmp_path / "log")
    try:
        streams = Streams(Client(server), NUM_STREAMS, MODELS[1:])
        server._process.send_signal(signal.SIGTERM)
        wait_not_ready(server.endpoints.http, 30)
        streams.assert_told()
        assert server._process.wait(30) == 0
        time.sleep(1)
        assert list(server.processes()) == []
        assert list(SHARED_MEMORY.glob(f"{server._prefix}*")) == []
    finally:
        server.stop()
