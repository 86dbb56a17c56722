"""Send one small request to a running server, for a token or for the text of a stream.

Plain HTTP with the standard library, as a user with curl would do it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from slipstream_contract import whole
from slipstream_contract.deployment import ENGINE, by_deployment, role_of, text_model_of
from slipstream_contract.probes import PROBE, Probe
from slipstream_contract.tensors import LLMAPI

from slipstream_serve.triton import ServeError

_PROBE_TEXT = "a"
_TOKEN_S = 120.0  # to wait for the answer of a probe
_PIECE_S = 60.0  # to wait for the next piece of a stream


def text_model(models: Iterable[str]) -> str | None:
    """Return the model to which a text should be sent; None if there is none."""
    found = (text_model_of(roles) for roles in by_deployment(models).values())
    return next((model for model in found if model is not None), None)


def _body(model: str, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    role = role_of(model)
    if role == LLMAPI.name:
        return {"text_input": prompt, "sampling_param_max_tokens": max_tokens, "streaming": stream}
    if role == "vllm_model":
        sampling = {"max_tokens": max_tokens, "temperature": 0}
        return {"text_input": prompt, "stream": stream, "parameters": sampling}
    body = {"text_input": prompt, "max_tokens": max_tokens, "stream": stream}
    return body | {"exclude_input_in_output": True}


def _post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            text = text or str(error)
        raise ServeError(f"{url}: {text.strip().splitlines()[0]}") from None
    except OSError as error:
        raise ServeError(f"{url}: {error}") from None


def first_token(http: str, models: Iterable[str]) -> None:
    """Generate one token in each deployment of these models; there may be none.

    Raises ServeError with the server's message if that fails.
    """
    for roles in by_deployment(models).values():
        model = text_model_of(roles)
        if model is not None:
            _generate(http, model, _body(model, _PROBE_TEXT, 1, stream=False))
        elif ENGINE in roles:
            body = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1}
            _generate(http, roles[ENGINE], body)


def _generate(http: str, model: str, body: dict[str, Any]) -> None:
    body[PROBE] = Probe.TOKEN
    with _post(f"{http}/v2/models/{model}/generate", body, _TOKEN_S) as reply:
        answer = json.loads(reply.read())
    if "error" in answer:  # a decoupled model sends errors with status 200
        raise ServeError(f"{model}: {str(answer['error']).splitlines()[0]}")


def stream_text(http: str, model: str, prompt: str, max_tokens: int) -> Iterator[str]:
    """Yield the pieces of text of one completion, as the server sends them (server-sent events).

    Raises ServeError, also if the answer ends too early.
    """
    body = _body(model, prompt, max_tokens, stream=True) | whole.mark_of(model)
    is_whole = False
    with _post(f"{http}/v2/models/{model}/generate_stream", body, _PIECE_S) as reply:
        for line in reply:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[len(b"data:") :])
            if "error" in event:
                raise ServeError(f"{model}: {str(event['error']).splitlines()[0]}")
            is_whole = is_whole or whole.is_last(event)
            yield event.get("text_output", "")
    if not is_whole:
        raise ServeError(f"{model}: {whole.CUT}")
