"""A server that ends while a hundred streams run: `slipstream serve`, and one alone."""

import functools
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.faults.asking import MODELS, Ask, pieces
from fixtures.server.serve_process import Serve, short_directory
from fixtures.server.support import LONG, PROMPT, Client, RequestError, start
from slipstream_serve.triton import SHARED_MEMORY, Endpoints

pytestmark = [pytest.mark.triton, pytest.mark.rest, pytest.mark.beside]

NUM_STREAMS = 100


class Streams:
    """Start `number` streams, of these models in turn and over both protocols, without an end."""

    def __init__(self, client: Client, number: int, models: tuple[str, ...]) -> None:
        # A request of each model: its text so far is a prefix of the longest answer.
        kinds = [
            Ask(model, PROMPT, 1, LONG, end_id=-1, is_http=is_http)
            for model in models
            for is_http in (False, True)
        ]
        self.errors: list[str] = []
        self._texts: list[tuple[Ask, list[str]]] = []
        self._threads = []
        for index in range(number):
            self._texts.append((kinds[index % len(kinds)], []))
            run = functools.partial(self._run, client, *self._texts[-1])
            self._threads.append(threading.Thread(target=run, daemon=True))
            self._threads[-1].start()
        begin = time.monotonic()
        while not all(text for _, text in self._texts):
            assert time.monotonic() - begin < 120, self.errors[:3]
            time.sleep(0.05)

    def _run(self, client: Client, ask: Ask, text: list[str]) -> None:
        try:
            for piece in pieces(client, ask, 60):
                text.append(piece)
            self.errors.append("ended by itself")
        except RequestError as error:
            self.errors.append(str(error))
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def assert_told(self) -> None:
        """Each has had one error that says why, and before it a beginning of its answer."""
        deadline = time.monotonic() + 120
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert len(self.errors) == len(self._threads)
        unclear = [
            text for text in self.errors if "UNAVAILABLE: the server is stopping" not in text
        ]
        assert unclear == []
        for model in {ask.model for ask, _ in self._texts}:
            texts = ["".join(text) for ask, text in self._texts if ask.model == model]
            longest = max(texts, key=len)
            assert [text for text in texts if not longest.startswith(text)] == []


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
        wait_not_ready(client.http, 120)
        streams.assert_told()
        serve.process.wait(120)
        assert serve.process.returncode == 0
        serve.assert_gone()


@pytest.mark.slow
def test_a_tritonserver_alone_with_100_streams(roomy: Path, tmp_path: Path) -> None:
    """Without the true ensemble, whose streams hang if Triton refuses their next step."""
    server = start(roomy, tmp_path / "log")
    try:
        streams = Streams(Client(server), NUM_STREAMS, MODELS[1:])
        server._process.send_signal(signal.SIGTERM)
        wait_not_ready(server.endpoints.http, 120)
        streams.assert_told()
        assert server._process.wait(120) == 0
        time.sleep(1)
        assert list(server.processes()) == []
        assert list(SHARED_MEMORY.glob(f"{server._prefix}*")) == []
    finally:
        server.stop()
