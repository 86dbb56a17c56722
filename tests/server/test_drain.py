"""A server that drains: what runs ends whole, what is new is refused, and health says so."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures.server.serve_process import Serve, short_directory
from fixtures.server.support import CHECKPOINT, compose
from fixtures.waiting import wait_for
from slipstream_client import cli
from slipstream_runtime import draining, inflight
from slipstream_runtime.directory import Runtime
from slipstream_serve.triton import Endpoints

pytestmark = [pytest.mark.triton, pytest.mark.beside]
TOKENS = 500
PROMPT = "import os\n"
# A request counts as in flight a moment before it is accepted, or refused as the server drains.
DELAYED = ("--delay", "1.5", "--timeout", "2")


class Stream(threading.Thread):
    """A stream of `TOKENS` tokens; `pieces` grows while it runs."""

    def __init__(self, port: int, path: str, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self.pieces: list[dict[str, object] | str] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._connection.request("POST", path, json.dumps(body))
        self.start()

    def run(self) -> None:
        for line in self._connection.getresponse():
            data = line.decode().strip().removeprefix("data: ")
            if data.startswith("{"):
                self.pieces.append(json.loads(data))
            elif data:
                self.pieces.append(data)

    def wait_token(self) -> None:
        deadline = time.monotonic() + 120
        while not self.pieces:
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Drained:
    """A server with a gateway, and what asks it."""

    def __init__(self, serve: Serve, openai_port: int) -> None:
        self.serve = serve
        self.openai_port = openai_port
        (directory,) = serve.scratch.glob("slipstream-serve-*")
        self.runtime = Runtime(directory)

    def openai_stream(self) -> Stream:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        return Stream(self.openai_port, "/v1/completions", body | options)

    def triton_stream(self, **changes: object) -> Stream:
        body = {"text_input": PROMPT, "max_tokens": TOKENS, "stream": True, "end_id": -1}
        path = "/v2/models/ensemble/generate_stream"
        return Stream(self.serve.ports[0], path, body | changes)

    def ask(self, port: int, path: str, body: dict[str, object]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def ask_openai(self) -> tuple[int, str]:
        return self.ask(self.openai_port, "/v1/completions", {"prompt": "a", "max_tokens": 2})

    def ask_triton(self) -> tuple[int, str]:
        body = {"text_input": "a", "max_tokens": 2}
        return self.ask(self.serve.ports[0], "/v2/models/ensemble/generate", body)

    def command(self, *words: str) -> int:
        return cli.main(list(words))

    def drain(self, *words: str) -> int:
        return self.command("drain", "--runtime", str(self.runtime.directory), *words)

    def health(self, *words: str) -> int:
        url = ("--grpc-port", str(self.serve.ports[1]))
        return self.command("health", *url, "--timeout", "60", *words)

    def num_with_probes(self) -> int:
        """How many requests are in flight, those of clients and probes."""
        return sum(map(inflight.count, self.runtime.directory.glob("in-flight-*")))

    def wait_in_flight(self, number: int) -> None:
        """Wait until so many of clients are in flight, the ensemble's at its engine."""
        deadline = time.monotonic() + 120
        while draining.num_in_flight(self.runtime) != number or not any(
            map(inflight.count_clients, self.runtime.directory.glob("in-flight-tensorrt_llm-*"))
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def state(self) -> dict[str, Any]:
        path = "/v2/models/slipstream_health/infer"
        status, text = self.ask(self.serve.ports[0], path, {"inputs": []})
        assert status == 200, text
        state = json.loads(json.loads(text)["outputs"][0]["data"][0])
        assert isinstance(state, dict)
        return state


@contextlib.contextmanager
def stopped(*pids: int):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.rest
def test_a_draining_server_ends_what_runs_and_refuses_what_is_new(repository: Path, capfd):
    port = Endpoints.free().http_port
    with short_directory() as folder:
        serve = Serve(repository, folder / "scratch", "--drain", "60", openai_port=port)
        try:
            serve.wait_ready()
            server = Drained(serve, port)
            _check_bounded(server, capfd)
            _check_refusals(server, capfd)
            _check_delay(server)
            _check_default_server(server)
            last = server.openai_stream()
            last.wait_token()
        finally:
            serve.end(signal.SIGTERM)  # drains, too: `--drain`
        last.join(120)
        _check_whole(last)
        serve.assert_gone()


@pytest.mark.rest
def test_replicas_drain_together(tmp_path: Path, capfd) -> None:
    options = ("--dtype", "float32", "--kv-cache-tokens", "4096", "--replicas", "2")
    repository = compose(CHECKPOINT, tmp_path / "models", *options)
    port = Endpoints.free().http_port
    with short_directory() as folder:
        serve = Serve(repository, folder / "scratch", "--drain", "60", openai_port=port)
        try:
            serve.wait_ready()
            server = Drained(serve, port)
            before = [each["num_requests"] for each in server.state()["replicas"]]
            with stopped(*(each["engine_pid"] for each in server.state()["replicas"])):
                streams = [server.openai_stream(), server.openai_stream()]
                wait_for(lambda: draining.num_in_flight(server.runtime) == 2)
                assert server.drain(*DELAYED) == 1
                assert "2 requests still run after 2 s" in capfd.readouterr().err
            after = [each["num_requests"] for each in server.state()["replicas"]]
            assert after == [each + 1 for each in before]  # one at each
        finally:
            serve.end(signal.SIGTERM)
        for stream in streams:
            stream.join(120)
            _check_whole(stream)
        serve.assert_gone()


def _check_bounded(server: Drained, capfd) -> None:
    with stopped(
        server.state()["engine_pid"]
    ):  # so that neither has ended, however fast the engine is
        streams = [server.openai_stream(), server.triton_stream()]
        server.wait_in_flight(2)
        probe = server.triton_stream(max_tokens=1, probe="token")  # nothing to wait for
        wait_for(lambda: server.num_with_probes() > 2)
        assert server.drain(*DELAYED) == 1
        assert "2 requests still run after 2 s" in capfd.readouterr().err
    assert server.drain("--delay", "0", "--timeout", "60") == 0
    for stream in (*streams, probe):
        stream.join(120)
        assert not stream.is_alive()
    _check_whole(streams[0])
    said = "".join(str(piece["text_output"]) for piece in streams[1].pieces)
    assert len(said) > TOKENS  # characters, of whole streams alone


def _check_whole(stream: Stream) -> None:
    assert stream.pieces[-1] == "[DONE]"
    assert stream.pieces[-2]["usage"]["completion_tokens"] == TOKENS


def _check_refusals(server: Drained, capfd) -> None:
    for status, text in (server.ask_openai(), server.ask_triton()):
        assert status in (400, 503)  # Triton's HTTP and OpenAI's
        assert "the server is draining" in text
    assert server.ask(server.openai_port, "/health", {})[0] == 503
    assert server.health() == 1
    assert "the server is draining" in capfd.readouterr().err
    assert server.health("--live") == 0
    assert server.drain("--undo") == 0
    assert server.health() == 0
    for status, text in (server.ask_openai(), server.ask_triton()):
        assert status == 200, text


def _check_delay(server: Drained) -> None:
    """Before the moment of refusal it is not ready, and serves."""
    draining.start(server.runtime, 600)
    assert server.health() == 1
    assert server.ask(server.openai_port, "/health", {})[0] == 503
    for status, text in (server.ask_openai(), server.ask_triton()):
        assert status == 200, text
    draining.undo(server.runtime)


def _check_default_server(server: Drained) -> None:
    """Without --runtime it finds the one server of this folder, as in a container."""
    command = [sys.executable, "-m", "slipstream_client.cli", "drain", "--undo"]
    environment = os.environ | {"TMPDIR": str(server.serve.scratch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
