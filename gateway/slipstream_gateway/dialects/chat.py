"""Chat completions: the dialect that the others are mapped to."""

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_gateway.answer import (
    Answer,
    CallArguments,
    CallStart,
    Delta,
    Finish,
    Reasoning,
    Text,
    TokenLogProb,
    Usage,
)
from slipstream_gateway.dialects.openai import Common, chat_log_probs, encode, finish_reason
from slipstream_gateway.errors import ApiError, openai_body


class ChatWriter(Common):
    """Writes chat completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        super().__init__(body, model)
        self._n = body.get("n") or 1
        self._has_log_probs = body.get("logprobs") is True
        self._has_prompt = body.get("prompt_logprobs") is not None
        self._prefixes: dict[int, bytes] = {}
        self._after = b'},"logprobs":null,"finish_reason":null}]%b}\n\n' % (
            b',"usage":null' if self._has_usage else b""
        )

    def start(self, prompt_tokens: int) -> bytes:
        """Return the first chunk of each answer: its role, and no text."""
        delta = b'{"role":"assistant","content":""}'
        return b"".join(self._choice(index, delta) for index in range(self._n))

    def write(
        self, index: int, deltas: Sequence[Delta], log_probs: Sequence[TokenLogProb]
    ) -> bytes:
        """Return a chunk for each part that is new."""
        first = deltas[0] if len(deltas) == 1 else None
        if isinstance(first, Text) and self.is_plain and not log_probs:
            return b"%b%b%b" % (self._before(index), encode(first.text), self._after)
        parts = [_delta(run) for run in _runs(deltas)]
        if not parts and (log_probs or index in self._ids):
            parts = [b'{"content":""}']
        data = b""
        for part in parts:
            data += self._choice(index, part, log_probs if self._has_log_probs else None)
            log_probs = ()  # all are in the first
        return data

    def _before(self, index: int) -> bytes:
        """Return what comes before the text of a chunk without more."""
        before = self._prefixes.get(index)
        if before is None:
            head = b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (self._head, index)
            before = self._prefixes[index] = head
        return before

    def finish(self, index: int, finish: Finish, usage: Usage) -> bytes:
        """Return the chunk with the reason."""
        return self._choice(index, b"{}", None, finish)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return a whole chat completion."""
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        body = self.whole_object(choices, usage)
        if self._has_ids:
            body["prompt_token_ids"] = list(self._prompts[0].token_ids)
        if self._has_prompt:
            body["prompt_logprobs"] = self._prompts[0].json()
        return encode(body)

    def _choice(
        self,
        index: int,
        delta: bytes,
        log_probs: Sequence[TokenLogProb] | None = None,
        finish: Finish | None = None,
    ) -> bytes:
        ids = self.take_ids(index) if delta != b"{}" or self._ids else b""
        shown = b"null" if not log_probs else encode(chat_log_probs(log_probs))
        reason = b"null" if finish is None else encode(finish_reason(finish))
        more = b""
        if finish is not None and finish.stop_reason is not None:
            more = b',"stop_reason":%b' % encode(finish.stop_reason)
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b%b}' % (
            *(index, delta, shown, reason, more, ids),
        )
        return self.chunk(choice)

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "refusal": None,
        }
        if answer.reasoning:
            message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        choice: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": chat_log_probs(answer.log_probs) if self._has_log_probs else None,
            "finish_reason": finish_reason(answer.finish),
        }
        if answer.finish is not None and answer.finish.stop_reason is not None:
            choice["stop_reason"] = answer.finish.stop_reason
        if self._has_ids:
            choice["token_ids"] = self._ids.pop(index, [])
        return choice


class Chat:
    """The dialect of `/v1/chat/completions`."""

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body as it is."""
        return dict(body)

    def ignored(self, body: Mapping[str, Any]) -> list[str]:
        """Return nothing: the table of the body's fields says what has no effect."""
        return []

    def writer(self, body: Mapping[str, Any], model: str) -> ChatWriter:
        """Return a writer for the answer to a body."""
        return ChatWriter(body, model)

    def error(self, error: ApiError) -> bytes:
        """Return OpenAI's body of an error."""
        return openai_body(error)


def _runs(deltas: Sequence[Delta]) -> list[list[Delta]]:
    """Return deltas that one chunk can hold together: neighbours of one kind, and of one call."""
    runs: list[list[Delta]] = []
    for delta in deltas:
        if runs and _joins(runs[-1][-1], delta):
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return runs


def _joins(before: Delta, delta: Delta) -> bool:
    if isinstance(before, CallArguments) and isinstance(delta, CallArguments):
        return before.index == delta.index
    return type(before) is type(delta) and isinstance(delta, Text | Reasoning)


def _delta(run: Sequence[Delta]) -> bytes:
    first = run[0]
    match first:
        case Text():
            return b'{"content":%b}' % encode("".join(each.text for each in run))  # type: ignore[union-attr]
        case Reasoning():
            text = encode("".join(each.text for each in run))  # type: ignore[union-attr]
            return b'{"reasoning":%b,"reasoning_content":%b}' % (text, text)
        case CallStart():
            call = {
                "index": first.index,
                "id": first.id,
                "type": "function",
                "function": {"name": first.name, "arguments": ""},
            }
        case CallArguments():
            fragment = "".join(each.fragment for each in run)  # type: ignore[union-attr]
            call = {"index": first.index, "function": {"arguments": fragment}}
    return encode({"tool_calls": [call]})
