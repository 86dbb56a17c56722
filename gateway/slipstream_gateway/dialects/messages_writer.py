"""Write answers of `/v1/messages`: events of content blocks, or one message."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_gateway.answer import (
    Answer,
    Call,
    CallArguments,
    CallStart,
    Delta,
    Finish,
    Reasoning,
    Text,
    TokenLogProb,
    Usage,
)
from slipstream_gateway.dialects.events import encode, event, joined
from slipstream_gateway.dialects.partial import partial_object
from slipstream_gateway.errors import ApiError

SIGNATURE = "slipstream"  # clients send blocks back only with one; it is not checked
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ABORTED = ApiError(500, "The answer was aborted by the server")


def error_shape(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's words; its message names the field."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, kind)
    message = error.message
    if error.code == "context_length_exceeded":  # by these words agents compact their context
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesWriter:
    """Writer of one message. A new kind of text, or a call, closes the block before it."""

    def __init__(self, body: Mapping[str, Any], model: str, ident: str | None = None) -> None:
        self._ident = ident or uuid.uuid4().hex
        self._model = model
        self._shows = (body.get("thinking") or {}).get("display") != "omitted"
        self._open: type[Text | Reasoning | Call] | None = None
        self._number = -1  # of the last block
        self._prefix = b""  # of a delta of the open block
        self._calls = 0
        self._finish: Finish | None = None

    def start(self, prompt_tokens: int) -> bytes:
        """Return `message_start`, with the count of all prompt tokens, and a `ping`."""
        usage = _usage(Usage(prompt=prompt_tokens))
        message = self._message([], None, usage)
        return event("message_start", {"message": message}) + event("ping", {})

    def write(
        self, index: int, deltas: Sequence[Delta], log_probs: Sequence[TokenLogProb]
    ) -> bytes:
        """Return events for what is new of the only answer, 0. Log probs have no place here."""
        assert index == 0, "a message has one answer"
        out: list[bytes] = []
        for delta in joined(deltas):
            match delta:
                case Text(text=text):
                    if self._open is not Text:
                        self._start(out, Text, {"type": "text", "text": ""}, "text")
                    out.append(b"%b%b}}\n\n" % (self._prefix, encode(text)))
                case Reasoning(text):
                    if self._open is not Reasoning:
                        block = {"type": "thinking", "thinking": "", "signature": ""}
                        self._start(out, Reasoning, block, "thinking")
                    if self._shows:
                        out.append(b"%b%b}}\n\n" % (self._prefix, encode(text)))
                case CallStart():
                    self._calls += 1
                    use = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                    self._start(out, Call, use, "partial_json", "input_json")
                case CallArguments():
                    out.append(b"%b%b}}\n\n" % (self._prefix, encode(delta.fragment)))
        return b"".join(out)

    def finish(self, index: int, finish: Finish, usage: Usage) -> bytes:
        """Return the end of the open block."""
        self._finish = finish
        out: list[bytes] = []
        self._stop(out)
        return b"".join(out)

    def end(self, usage: Usage) -> bytes:
        """Return `message_delta`, with the reason of the end, and `message_stop`."""
        assert self._finish is not None
        if self._finish.reason == "abort":
            return self.fail(_ABORTED)
        reason, sequence = _stop_reason(self._finish, self._calls > 0)
        payload = {
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _usage(usage),
        }
        return event("message_delta", payload) + event("message_stop", {})

    def fail(self, error: ApiError) -> bytes:
        """Return an `error` event, which SDKs raise."""
        return event("error", error_shape(error))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the message to a request that is not streamed. Raises ApiError: it was aborted."""
        (answer,) = answers
        assert answer.finish is not None
        if answer.finish.reason == "abort":
            raise _ABORTED
        content: list[dict[str, Any]] = []
        for part in answer.parts:
            match part:
                case Text(text):
                    content.append({"type": "text", "text": text})
                case Reasoning(text):
                    shown = text if self._shows else ""
                    content.append({"type": "thinking", "thinking": shown, "signature": SIGNATURE})
                case Call():
                    use = {"type": "tool_use", "id": part.id, "name": part.name}
                    content.append({**use, "input": partial_object(part.arguments)})
        stop = _stop_reason(answer.finish, bool(answer.calls))
        return encode(self._message(content, stop, _usage(usage)))

    def _message(
        self,
        content: Sequence[Mapping[str, Any]],
        stop: tuple[str, str | None] | None,
        usage: Mapping[str, Any],
    ) -> dict[str, Any]:
        reason, sequence = stop or (None, None)
        return {
            "id": f"msg_{self._ident}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _start(
        self,
        out: list[bytes],
        kind: type[Text | Reasoning | Call],
        block: Mapping[str, Any],
        key: str,
        name: str | None = None,
    ) -> None:
        """Open a block whose deltas have their text at `key`, in a `name`_delta."""
        self._stop(out)
        self._open = kind
        self._number += 1
        out.append(event("content_block_start", {"index": self._number, "content_block": block}))
        self._prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b_delta","%b":'
        ) % (self._number, (name or key).encode(), key.encode())

    def _stop(self, out: list[bytes]) -> None:
        if self._open is None:
            return
        if self._open is Reasoning:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            out.append(event("content_block_delta", {"index": self._number, "delta": delta}))
        out.append(event("content_block_stop", {"index": self._number}))
        self._open = None


def _stop_reason(finish: Finish, has_calls: bool) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if finish.reason == "length":
        return "max_tokens", None
    if isinstance(finish.stop_reason, str):
        return "stop_sequence", finish.stop_reason
    return ("tool_use" if has_calls else "end_turn"), None


def _usage(usage: Usage) -> dict[str, Any]:
    """Return counts; those of the input are exclusive: cached tokens are no input tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }
