"""Users for locust: gRPC streams through the SDK, and HTTP server-sent events.

    locust -f load/locustfile.py --headless -u 16 -r 8 -t 20s --host http://127.0.0.1:8000

Environment: GRPC (host:port), MODEL, MAX_TOKENS, which every answer has, LOAD (see `serving.LOADS`)
and FIELDS, JSON of further parameters. Beside whole requests, every user fires the events `connect`
(once), `ttft` (start to first response) and `itl` (mean time between responses of one request).
With TOGETHER, so many gRPC users wait for each other to begin.
"""

import grpc.experimental.gevent

grpc.experimental.gevent.init_gevent()  # before any channel: gRPC's own threads would block gevent

import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import requests  # noqa: E402
from locust import User, task  # noqa: E402
from serving import fields, prompts  # noqa: E402
from slipstream_client import SlipstreamClient  # noqa: E402
from slipstream_contract import whole  # noqa: E402

GRPC = os.environ.get("GRPC", "127.0.0.1:8001")
MODEL = os.environ.get("MODEL", "ensemble")
LOAD = os.environ.get("LOAD", "plain")
PROMPTS = prompts(LOAD)
PARAMETERS: dict[str, Any] = fields(
    MODEL, LOAD, int(os.environ.get("MAX_TOKENS", "32")), os.environ.get("FIELDS", "")
)


class Clock:
    """Times the responses of one request and fires its events."""

    def __init__(self, environment: Any, kind: str) -> None:
        self._fire = environment.events.request.fire
        self._kind = kind

    def watch(self, responses: Iterable[int]) -> None:
        """Consumes the responses (each given as its size in bytes); an error is an event too."""
        start, times, size = time.perf_counter(), [], 0
        error: Exception | None = None
        try:
            for length in responses:
                times.append(time.perf_counter())
                size += length
            if not times:
                error = RuntimeError("ended without a response")
        except Exception as raised:
            error = raised
        self._event("request", time.perf_counter() - start, size, error)
        if error is None:
            self._event("ttft", times[0] - start, 0, None)
        if error is None and len(times) > 1:
            self._event("itl", (times[-1] - times[0]) / (len(times) - 1), 0, None)

    def connected(self, begin: float) -> None:
        """A user is there; locust's own times begin with the first answer."""
        self._event("connect", time.perf_counter() - begin, 0, None)

    def _event(self, name: str, seconds: float, size: int, error: Exception | None) -> None:
        self._fire(
            request_type=self._kind,
            name=name,
            response_time=seconds * 1e3,
            response_length=size,
            exception=error,
            context={},
        )


def _wait_for_others() -> None:
    """Until TOGETHER users are connected; at once where that is not set."""
    _connected.append(True)
    while len(_connected) < int(os.environ.get("TOGETHER", "0")):
        gevent.sleep(0.01)


_connected: list[bool] = []


class GrpcUser(User):
    """One stream after the other through the SDK."""

    def on_start(self) -> None:
        """Connects."""
        begin = time.perf_counter()
        self.client = SlipstreamClient(GRPC, model=MODEL, timeout_s=120)
        self.client.is_ready(timeout_s=30)  # the connection is made by the first call
        _wait_for_others()
        Clock(self.environment, "gRPC").connected(begin)

    def on_stop(self) -> None:
        """Disconnects."""
        self.client.close()

    @task
    def complete(self) -> None:
        """One completion."""

        def sizes() -> Iterable[int]:
            with self.client.stream(random.choice(PROMPTS), **PARAMETERS) as chunks:
                for chunk in chunks:
                    yield len(chunk.text.encode())

        Clock(self.environment, "gRPC").watch(sizes())


class SseUser(User):
    """One `generate_stream` after the other."""

    def on_start(self) -> None:
        """Opens a session of its own: locust's would count the headers as the whole request."""
        begin = time.perf_counter()
        self.session = requests.Session()
        Clock(self.environment, "SSE").connected(begin)

    def on_stop(self) -> None:
        """Disconnects."""
        self.session.close()

    @task
    def complete(self) -> None:
        """One completion."""
        body: dict[str, Any] = {"text_input": random.choice(PROMPTS), "stream": True}
        if MODEL == "vllm_model":
            body["sampling_parameters"] = json.dumps(PARAMETERS)
        else:
            body |= PARAMETERS | {"exclude_input_in_output": True}
        body |= whole.mark_of(MODEL)

        def sizes() -> Iterable[int]:
            url = f"{self.host}/v2/models/{MODEL}/generate_stream"
            is_whole = False
            with self.session.post(url, json=body, stream=True, timeout=120) as reply:
                for line in reply.iter_lines():
                    event = json.loads(line.removeprefix(b"data:") or b"{}")
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    is_whole = is_whole or whole.is_last(event)
                    if event:
                        yield len(line)
            if not is_whole:
                raise RuntimeError(whole.CUT)

        Clock(self.environment, "SSE").watch(sizes())
