"""Write answers of `/v1/responses`: events with rising numbers, or one response."""

import time
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
from slipstream_gateway.dialects.responses_fields import LOG_PROBS
from slipstream_gateway.dialects.responses_items import Item, MessageItem, item_of
from slipstream_gateway.errors import ApiError

_ABORTED = ApiError(500, "The answer was aborted by the server")


class ResponsesWriter:
    """Writer of one response.

    A new kind of text, or a call, closes the item before it. With log probs, messages close at the
    end: they hold the log probs of all tokens, those of calls after them included.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        model: str,
        ident: str | None = None,
    ) -> None:
        self._ident = ident or uuid.uuid4().hex
        self._fixed = _echo(body, tools, model, f"resp_{self._ident}", int(time.time()))
        self._waits = bool(body.get("top_logprobs")) or LOG_PROBS in (body.get("include") or ())
        self._number = -1  # of the last event
        self._items: list[Item] = []
        self._pending: list[TokenLogProb] = []  # whose text has not come yet
        self._finish: Finish | None = None

    def start(self, prompt_tokens: int) -> bytes:
        """Return `response.created` and `response.in_progress`."""
        response = {"response": self._response("in_progress")}
        return self._event("response.created", response) + self._event(
            "response.in_progress", response
        )

    def write(
        self, index: int, deltas: Sequence[Delta], log_probs: Sequence[TokenLogProb]
    ) -> bytes:
        """Return events for what is new of the only answer, 0."""
        assert index == 0, "a response has one answer"
        self._pending += log_probs
        out: list[bytes] = []
        for delta in joined(deltas):
            match delta:
                case CallStart():
                    self._open(out, Call(delta.id, delta.name))
                case CallArguments():
                    out.append(self._delta(self._items[-1], delta.fragment))
                case Text() | Reasoning():
                    kind = "message" if isinstance(delta, Text) else "reasoning"
                    if not self._items or self._items[-1].kind != kind:
                        self._open(out, delta)
                    out.append(self._delta(self._items[-1], delta.text))
        return b"".join(out)

    def finish(self, index: int, finish: Finish, usage: Usage) -> bytes:
        """Return the events that close all items."""
        self._finish = finish
        out: list[bytes] = []
        if not self._items:
            self._open(out, Text(""))
        last = "incomplete" if finish.reason in ("length", "abort") else "completed"
        if self._pending:
            messages = [item for item in self._items if isinstance(item, MessageItem)]
            out += [self._delta(item, "") for item in messages[-1:]]
        for item in self._items:
            if item.status == "in_progress":
                self._close(out, item, last if item is self._items[-1] else "completed")
        return b"".join(out)

    def end(self, usage: Usage) -> bytes:
        """Return the last event: the whole response, completed, incomplete or failed."""
        assert self._finish is not None
        status = _STATUS[self._finish.reason]
        return self._event(f"response.{status}", {"response": self._response(status, usage)})

    def fail(self, error: ApiError) -> bytes:
        """Return `error`, which SDKs raise, and `response.failed`, which agents read."""
        for item in self._items:
            if item.status == "in_progress":
                item.status = "incomplete"
        code = error.code or "server_error"
        shape = {"code": code, "message": error.message, "param": error.param}
        nested = {"type": "server_error", **shape}
        failed = self._response("failed", None, error)
        return self._event("error", {**shape, "error": nested}) + self._event(
            "response.failed", {"response": failed}
        )

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the response to a request that is not streamed."""
        (answer,) = answers
        assert answer.finish is not None
        parts = answer.parts or [Text("")]
        for number, part in enumerate(parts):
            item = item_of(part, self._ident, number)
            for _ in item.opening():  # a message has a part from here on
                pass
            text = part.arguments if isinstance(part, Call) else part.text
            is_last = number == len(parts) - 1
            item.delta(text, answer.log_probs if _is_last_text(parts, number) else ())
            is_cut = is_last and answer.finish.reason in ("length", "abort")
            item.status = "incomplete" if is_cut else "completed"
            self._items.append(item)
        self._finish = answer.finish
        return encode(self._response(_STATUS[answer.finish.reason], usage))

    def _event(self, name: str, payload: Mapping[str, Any]) -> bytes:
        self._number += 1
        return event(name, {"sequence_number": self._number, **payload})

    def _delta(self, item: Item, text: str) -> bytes:
        self._number += 1
        number = b"%d" % self._number
        if not isinstance(item, MessageItem) or not self._pending:
            return item.prefix + number + item.delta(text)
        pending, self._pending = self._pending, []
        return item.prefix + number + item.delta(text, pending)

    def _open(self, out: list[bytes], part: Text | Reasoning | Call) -> None:
        if self._items:
            last = self._items[-1]
            if not (self._waits and isinstance(last, MessageItem)):
                self._close(out, last, "completed")
        item = item_of(part, self._ident, len(self._items))
        self._items.append(item)
        for name, payload in item.opening():
            out.append(self._event(name, payload))

    def _close(self, out: list[bytes], item: Item, status: str) -> None:
        item.status = status
        for name, payload in item.closing():
            out.append(self._event(name, payload))

    def _response(
        self, status: str, usage: Usage | None = None, error: ApiError | None = None
    ) -> dict[str, Any]:
        if error is None and status == "failed":
            error = _ABORTED
        return {
            **self._fixed,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error and {"code": _error_code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "output": [item.shape() for item in self._items],
            "usage": usage and _usage(usage),
        }


_STATUS = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "incomplete",
    "abort": "failed",
}


def _is_last_text(parts: Sequence[Text | Reasoning | Call], number: int) -> bool:
    texts = [n for n, part in enumerate(parts) if isinstance(part, Text)]
    return bool(texts) and texts[-1] == number


def _error_code(error: ApiError) -> str:
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _echo(
    body: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    model: str,
    ident: str,
    created: int,
) -> dict[str, Any]:
    """Return what a response says of its request, with what holds where the request is silent."""

    def given(name: str, default: Any) -> Any:
        value = body.get(name)
        return default if value is None else value

    reasoning, text = given("reasoning", {}), given("text", {})
    return {
        "id": ident,
        "object": "response",
        "created_at": created,
        "model": model,
        "instructions": body.get("instructions"),
        "metadata": given("metadata", {}),
        "tools": tools,
        "tool_choice": given("tool_choice", "auto"),
        "parallel_tool_calls": given("parallel_tool_calls", True),
        "temperature": given("temperature", 1.0),
        "top_p": given("top_p", 1.0),
        "presence_penalty": given("presence_penalty", 0.0),
        "frequency_penalty": given("frequency_penalty", 0.0),
        "top_logprobs": given("top_logprobs", 0),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": _format(text.get("format")), "verbosity": "medium"},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "prompt_cache_key": body.get("prompt_cache_key"),
        "safety_identifier": body.get("safety_identifier"),
        "user": body.get("user"),
    }


def _format(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None or given.get("type") != "json_schema":
        return {"type": (given or {}).get("type", "text")}
    return {
        "type": "json_schema",
        "name": given["name"],
        "description": given.get("description"),
        "schema": given["schema"],
        "strict": bool(given.get("strict")),
    }
