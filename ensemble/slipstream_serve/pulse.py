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
from collections.abc import Sequence
from typing import Any

from slipstream_contract.probes import PROBE
from slipstream_runtime.processes import is_running

from slipstream_serve.triton import Endpoints

SERVER_PERIOD_S = 1.0
PATIENCE_S = 30.0  # for one answer; silence is measured meanwhile
MODEL_PERIOD_S = 2.0
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


class Asker:
    """One thread that asks the same again and again. Any answer counts, an error too: what is asked
    for is whether somebody is there.
    """

    def __init__(self, name: str, period_s: float) -> None:
        self._closed = threading.Event()
        self._period_s = period_s
        self._heard_s = time.monotonic()
        self._asked_s = 0.0  # 0: no question waits for its answer
        self._thread = threading.Thread(target=self._run, name=f"pulse-{name}", daemon=True)

    def silence_s(self) -> float:
        """Since the last answer, the time between two questions included."""
        return time.monotonic() - self._heard_s if self._thread.ident else 0.0

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
        self._interrupt()

    def close(self) -> None:
        """Ask no more. A server that ends waits for open connections."""
        self._closed.set()
        self.renew()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._asked_s = time.monotonic()
            if self._ask():
                self.reset()
            else:
                self._asked_s = 0.0
            self._closed.wait(self._period_s)
        self._leave()

    def _ask(self) -> bool:
        """Whether there was an answer."""
        raise NotImplementedError

    def _interrupt(self) -> None:
        """From another thread: the question that waits has no answer."""
        raise NotImplementedError

    def _leave(self) -> None:
        """The last call."""
        raise NotImplementedError


class Pulse(Asker):
    """Of a model or of the server, over HTTP.

    It keeps its one connection and so needs none of the server's last files. A model is not asked
    once one of its `pids` has ended: Triton 24.10 never lets go of a model of which a dead process
    was asked, also where it has answered with an error.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        model: str | None,
        pids: Sequence[int] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Of a model; None: of the server. A model that is not known is not asked, nor silent.

        `patience_s` is the longest wait for one answer; then the connection is closed.
        """
        super().__init__(str(model), MODEL_PERIOD_S if model else SERVER_PERIOD_S)
        self.pids = pids
        host, port = endpoints.connectable
        self._connection = http.client.HTTPConnection(host, port, timeout=patience_s)
        self._path, self._body = "/v2/health/live", b""
        if model in QUESTIONS:
            verb, body = QUESTIONS[model]
            self._path, self._body = f"/v2/models/{model}/{verb}", json.dumps(body).encode()
        if model is None or model in QUESTIONS:
            self._thread.start()

    def _ask(self) -> bool:
        if not all(map(is_running, self.pids)):
            return False
        try:
            verb = "POST" if self._body else "GET"
            self._connection.request(verb, self._path, self._body or None)
            self._connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return False
        return True

    def _interrupt(self) -> None:
        socket_ = self._connection.sock
        if socket_ is not None:
            with contextlib.suppress(OSError):
                socket_.shutdown(socket.SHUT_RDWR)

    def _leave(self) -> None:
        self._connection.close()
