"""Asks a server, or one of its models, once a second or so whether it still answers.

No token is generated: a generating model answers a request with the parameter `probe` by itself,
and the stages before and after it are given one token's worth of work.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any

from slipstream_contract.runtime import PROBE

from slipstream_compose.triton import Endpoints

_SERVER_PERIOD_S, _MODEL_PERIOD_S = 1.0, 2.0
_PATIENCE_S = 30.0  # for one answer; silence is measured meanwhile
_TEXT = {"text_input": "", "max_tokens": 1, PROBE: True}
_TOKENS = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1, PROBE: True}
# model -> verb and body; other models are not asked.
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "preprocessing": ("generate", {"QUERY": "a", "REQUEST_OUTPUT_LEN": 1}),
    "postprocessing": ("generate", {"TOKENS_BATCH": [[0]], "SEQUENCE_LENGTH": [1]}),
    "tensorrt_llm": ("generate_stream", _TOKENS),
    "tensorrt_llm_bls": ("generate_stream", _TEXT),
    "ensemble": ("generate_stream", _TEXT),  # has a process of its own only where it is no ensemble
    "vllm_model": ("generate_stream", {"text_input": "", PROBE: True}),
}


class Pulse:
    """One thread with one connection, which it keeps: it needs none of the server's last files.

    Any answer counts, an error too: what is asked for is whether somebody is there.
    """

    def __init__(self, endpoints: Endpoints, model: str | None) -> None:
        """Of a model; None: of the server. A model that is not known is not asked, nor silent."""
        self._closed = threading.Event()
        host, port = endpoints.connectable
        self._connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
        self._path, self._body = "/v2/health/live", b""
        self._period_s = _SERVER_PERIOD_S
        self._heard_s = time.monotonic()
        self._asked_s = 0.0  # 0: no question waits for its answer
        self._is_asked = model is None or model in QUESTIONS
        if model is not None and self._is_asked:
            verb, body = QUESTIONS[model]
            self._path, self._body = f"/v2/models/{model}/{verb}", json.dumps(body).encode()
            self._period_s = _MODEL_PERIOD_S
        if self._is_asked:
            threading.Thread(target=self._run, name=f"pulse-{model}", daemon=True).start()

    def silence_s(self) -> float:
        """Since the last answer, the time between two questions included."""
        return time.monotonic() - self._heard_s if self._is_asked else 0.0

    def unanswered_s(self) -> float:
        """How long a question has been waiting; 0: none is."""
        return time.monotonic() - self._asked_s if self._asked_s else 0.0

    def reset(self) -> None:
        """Measure from now on."""
        self._heard_s = time.monotonic()
        self._asked_s = 0.0

    def renew(self) -> None:
        """Likewise, and ask anew: whoever was asked is gone."""
        self.reset()
        socket_ = self._connection.sock
        if socket_ is not None:
            with contextlib.suppress(OSError):
                socket_.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ask no more. A server that ends waits for open connections."""
        self._closed.set()
        self.renew()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._ask()
                self.reset()
            except (OSError, http.client.HTTPException):
                self._asked_s = 0.0
                self._connection.close()
            self._closed.wait(self._period_s)
        self._connection.close()

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        self._connection.request("POST" if self._body else "GET", self._path, self._body or None)
        self._connection.getresponse().read()
