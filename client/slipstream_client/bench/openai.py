"""Requests for OpenAI's streamed completions, of any server that has them."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from slipstream_contract.errors import Code, ContractError

from slipstream_client.failures import HTTP_CODES, no_server, other_server, words_of

NAME = "OpenAI"
KEY = "OPENAI_API_KEY"  # of the environment: sent as a bearer token
_PATIENCE_S = 10.0
_MAX_BYTES = 1 << 24


def body(
    model: str, prompt: str, max_tokens: int, sampling: Mapping[str, Any], has_end: bool
) -> bytes:
    """Return a request for a stream, greedy unless `sampling` says otherwise.

    `has_end`: the model's own end of text ends an answer.
    """
    fields: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
    fields |= {"stream": True, "temperature": 0.0, **sampling}
    fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if not has_end:
        fields["ignore_eos"] = True
    return json.dumps(fields).encode()


def first_model(address: str) -> str:
    """Return the first model that a server lists. Raises ContractError."""
    request = urllib.request.Request(f"http://{address}/v1/models", headers=authorization())
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as reply:
            return str(json.loads(reply.read(_MAX_BYTES))["data"][0]["id"])
    except urllib.error.HTTPError as error:
        if said := words_of(error.read(_MAX_BYTES)):
            code = HTTP_CODES.get(error.code, Code.UNAVAILABLE)
            raise ContractError(f"{said} (HTTP_{error.code})", code) from None
        raise other_server(address, NAME, f" (HTTP_{error.code})") from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or str(error.reason)
        raise no_server(address, reason, NAME) from None
    except (OSError, ValueError, LookupError, TypeError):
        raise other_server(address, NAME) from None


def authorization() -> dict[str, str]:
    """Return the header with the environment's key; {} without one."""
    key = os.environ.get(KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}
