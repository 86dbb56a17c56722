"""Probe a server, or one of its models, every second or two for whether it still answers.

No token is generated: a generating model answers a request with the parameter `probe` itself, and
the stages before and after it get one token's worth of work.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream_contract.deployment import role_of, settings_of
from slipstream_contract.probes import PROBE
from slipstream_contract.tensors import LLMAPI
from slipstream_runtime.processes import is_running

from slipstream_serve.triton import Endpoints

SERVER_PERIOD_S = 1.0
PATIENCE_S = 30.0  # for one answer; silence is measured in the meantime
MODEL_PERIOD_S = 2.0
_TEXT = {"text_input": "", "max_tokens": 1, PROBE: True}
_TOKENS = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1, PROBE: True}
# model -> verb and body of a probe; other models are not probed.
PROBES: dict[str, tuple[str, dict[str, Any]]] = {
    "preprocessing": ("generate", {"QUERY": "a", "REQUEST_OUTPUT_LEN": 1}),
    "postprocessing": ("generate", {"TOKENS_BATCH": [[0]], "SEQUENCE_LENGTH": [1]}),
    "tensorrt_llm": ("generate_stream", _TOKENS),
    "tensorrt_llm_bls": ("generate_stream", _TEXT),
    "ensemble": ("generate_stream", _TEXT),  # has a process of its own only with the wiring `fused`
    "vllm_model": ("generate_stream", {"text_input": "", PROBE: True}),
    LLMAPI.name: ("generate", {"text_input": "", PROBE: True}),
}


def contract_of(repository: Path, model: str) -> str:
    """Return the key of `PROBES` for a model of a repository: the role of a model of ours.

    LLM-API models have any name. A file that cannot be read says nothing: the model counts by its
    name, as those of other backends do.
    """
    try:
        settings = settings_of(repository / model)
    except ValueError:
        return model
    if settings.get("wiring") == "llmapi":
        return LLMAPI.name
    is_ours = "engine" in settings or "engine_of" in settings
    return role_of(model) if is_ours else model


class Prober:
    """A thread that sends the same probe again and again. Any answer counts, even an error: it
    shows that the other side is alive.
    """

    def __init__(self, name: str, period_s: float) -> None:
        self._closed = threading.Event()
        self._period_s = period_s
        self._heard_s = time.monotonic()
        self._sent_s = 0.0  # 0: no probe waits for its answer
        self._thread = threading.Thread(target=self._run, name=f"pulse-{name}", daemon=True)

    def silence_s(self) -> float:
        """Return the seconds since the last answer, with the time between two probes."""
        return time.monotonic() - self._heard_s if self._thread.ident else 0.0

    def unanswered_s(self) -> float:
        """Return how long a probe has been waiting, in seconds; 0: none is."""
        return time.monotonic() - self._sent_s if self._sent_s else 0.0

    def reset(self) -> None:
        """Measure silence from now on."""
        self._heard_s = time.monotonic()
        self._sent_s = 0.0

    def renew(self) -> None:
        """Reset, and abandon the waiting probe: the process that got it is gone."""
        self.reset()
        self._interrupt()

    def close(self) -> None:
        """Stop probing. A server that ends waits for open connections."""
        self._closed.set()
        self.renew()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._sent_s = time.monotonic()
            if self._probe():
                self.reset()
            else:
                self._sent_s = 0.0
            self._closed.wait(self._period_s)
        self._disconnect()

    def _probe(self) -> bool:
        """Send a probe; return whether there was an answer."""
        raise NotImplementedError

    def _interrupt(self) -> None:
        """Make the waiting probe fail; called from another thread."""
        raise NotImplementedError

    def _disconnect(self) -> None:
        """Close the connection; called last."""
        raise NotImplementedError


class Pulse(Prober):
    """Probes a model, or the server, over HTTP.

    It keeps one connection, so it needs no new descriptor of a server that has few left. A model is
    not probed once one of its `pids` has ended: Triton 24.10 never unloads a model that had a
    request for a dead process, even if it has answered with an error.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        model: str | None,
        pids: Sequence[int] = (),
        patience_s: float = PATIENCE_S,
        contract: str | None = None,
    ) -> None:
        """Probe a model; None: the server. An unknown model is not probed and never silent.

        Args:
            endpoints, model, pids: what is probed.
            patience_s: the longest wait for one answer; then the connection is closed.
            contract: the model of `PROBES` that this one speaks like; None: itself.
        """
        super().__init__(str(model), MODEL_PERIOD_S if model else SERVER_PERIOD_S)
        self.pids = pids
        host, port = endpoints.connectable
        self._connection = http.client.HTTPConnection(host, port, timeout=patience_s)
        self._path, self._body = "/v2/health/live", b""
        probe = PROBES.get(contract or model or "")
        if probe is not None:
            verb, body = probe
            self._path, self._body = f"/v2/models/{model}/{verb}", json.dumps(body).encode()
        if model is None or probe is not None:
            self._thread.start()

    def _probe(self) -> bool:
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

    def _disconnect(self) -> None:
        self._connection.close()
