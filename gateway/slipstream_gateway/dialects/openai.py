"""What chat completions and completions share: ids, usage, pieces of JSON, the end of a stream."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from slipstream_gateway.answer import Finish, TokenLogProb, Usage
from slipstream_gateway.errors import ApiError, openai_body
from slipstream_gateway.fields import read_flag
from slipstream_gateway.sequences import PromptPart

encode: Callable[[object], bytes] = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Return an event of a stream."""
    return b"data: %b\n\n" % data


def usage_object(usage: Usage) -> dict[str, object]:
    """Return OpenAI's object of token counts."""
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


def finish_reason(finish: Finish | None) -> str | None:
    """Return how an answer ended, as OpenAI writes it."""
    return None if finish is None else finish.reason


def stream_options(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether usage is wanted at the end of a stream, and with every event.

    Raises ApiError for options without a stream, or of a wrong type.
    """
    options = body.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise ApiError(400, f"stream_options is {options!r:.64}, not an object", "stream_options")
    if not body.get("stream"):
        raise ApiError(400, "stream_options is given, but stream is not true", "stream_options")
    flags = []
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.get(name)
        if not isinstance(value, bool | None):
            field = f"stream_options.{name}"
            raise ApiError(400, f"{field} is {value!r:.64}, neither true nor false", field)
        flags.append(bool(value))
    return flags[0], flags[0] and flags[1]


class Common:
    """What both writers keep of a request, and the events that they have in common."""

    prefix = ""  # of ids
    kind = ""  # the `object` of a whole answer
    kind_of_chunk = ""

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        """Read what shapes the response; `request_id` of the body is part of its id."""
        self.id = f"{self.prefix}-{body.get('request_id') or secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._has_usage, self._has_all_usage = stream_options(body)
        self._has_ids = read_flag(body, "return_token_ids")
        self.is_plain = not (self._has_all_usage or self._has_ids)  # chunks: nothing changes
        self._usage = Usage()
        self._prompts: Sequence[PromptPart] = ()
        self._per_prompt = 1
        self._ids: dict[int, list[int]] = {}  # of each answer, those not written yet
        self._shown_ids: set[int] = set()  # answers whose prompt's ids were written
        head = {
            "id": self.id,
            "object": self.kind_of_chunk,
            "created": self._created,
            "model": self._model,
        }
        self._head = encode(head)[:-1]

    def attach(self, usage: Usage, prompts: Sequence[PromptPart], per_prompt: int) -> None:
        """Take what changes while the answer comes."""
        self._usage, self._prompts, self._per_prompt = usage, prompts, per_prompt

    def note(self, index: int, token_ids: Sequence[int]) -> None:
        """Take the token ids of what is written next of answer `index`."""
        if self._has_ids and token_ids:
            self._ids.setdefault(index, []).extend(token_ids)

    def end(self, usage: Usage) -> bytes:
        """Return the usage if it is wanted, and the mark of the end."""
        if not self._has_usage:
            return DONE
        tail = b',"choices":[],"usage":%b}' % encode(usage_object(usage))
        return event(self._head + tail) + DONE

    def fail(self, error: ApiError) -> bytes:
        """Return an error in mid-stream, as SDKs raise it, and the mark of the end."""
        return event(openai_body(error)) + DONE

    def chunk(self, choice: bytes) -> bytes:
        """Return an event with one choice."""
        usage = b""
        if self._has_all_usage:
            usage = b',"usage":%b' % encode(usage_object(self._usage))
        elif self._has_usage:
            usage = b',"usage":null'
        return b'data: %b,"choices":[%b]%b}\n\n' % (self._head, choice, usage)

    def take_ids(self, index: int) -> bytes:
        """Return fields of a chunk's choice with new token ids; empty where none are wanted."""
        if not self._has_ids:
            return b""
        fields = b',"token_ids":%b' % encode(self._ids.pop(index, []))
        if index not in self._shown_ids:
            self._shown_ids.add(index)
            prompt = list(self._prompts[index // self._per_prompt].token_ids)
            fields = b',"prompt_token_ids":%b' % encode(prompt) + fields
        return fields

    def whole_object(self, choices: list[dict[str, object]], usage: Usage) -> dict[str, object]:
        """Return the body of a response that is not streamed."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage_object(usage),
            "system_fingerprint": None,
        }


def chat_log_probs(entries: Sequence[TokenLogProb]) -> dict[str, object]:
    """Return the log probs of a chat's choice."""
    content = []
    for entry in entries:
        tops = [_log_prob(each) for each in entry.top]
        content.append({**_log_prob(entry), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _log_prob(entry: TokenLogProb) -> dict[str, object]:
    return {"token": entry.text, "logprob": entry.log_prob, "bytes": list(entry.data)}
