"""Requests over the gateway's endpoints, and what each must come to, drawn by hypothesis.

A case starts from a body that must be served. Faults are put into it: values, by the tables of the
contract's own fuzzer and of what only chats or completions have; then maybe the text of the body or
the request around it is changed, after which anything but an internal error may come.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fuzz_cases import VOCABULARY, drawn
from fuzz_fields import VLLM
from hypothesis import strategies as st
from slipstream_gateway.dialects.openai_fields import CHAT, TABLES
from slipstream_gateway.fields import Use

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
_PATHS = (COMPLETIONS,) * 5 + (CHATS,) * 5 + (RESPONSES, MESSAGES) * 2 + (COUNT,)
_SMALL = ("/tokenize", "/detokenize", "/v1/embeddings")
_GETS = ("/v1/models", "/health", "/version", "/metrics", "/load", "/ping", "/tokenizer_info", "/")
_LONG = "x" * 400
MODEL = "pystdlib-5m"
_DEEP = "[" * 3000
_APART = {"logprobs", "response_format", "structured_outputs", "guided_decoding", "prompt_logprobs"}
_APART |= {"best_of", "use_beam_search", "logits_processors"}
_NOT_HERE = {"zz", "z" * 999}  # unknown fields are listed, not refused

Values = tuple[list[Any], list[Any]]  # that must be served, and that must not


def _of_contract() -> dict[str, Values]:
    """Return the sampling parameters of the contract's fuzzer that JSON can hold."""
    found = {}
    for name, (good, bad) in VLLM.items():
        if name not in _APART | _NOT_HERE and good and TABLES[CHAT][name].use is Use.SERVED:
            found[name] = (list(good), [value for value in bad if _is_json(value)])
    return found


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


_FLAGS: Values = ([True, False, None], ["true", 1, [], {}])
BOTH: dict[str, Values] = {
    **_of_contract(),
    "stream": ([True, False, None], ["yes", 1, 0.5, []]),
    "model": ([None], ["zz", 5, [], {}, _LONG]),
    "timeout_ms": ([60_000, 30_000], [-1, "x", 1.5, []]),
    "priority": ([0, 5, 9], [-1, 10, "x", 1.5]),
    "cache_salt": (["", "a", "é"], [5, [], {}]),
    "request_id": (["a", "b" * 64], [5, "", [], "c" * 2000]),
    "return_token_ids": _FLAGS,
    "return_tokens_as_token_ids": _FLAGS,
    "prompt_logprobs": ([None], [-2, "x", 10**6, []]),
    "truncation_side": (["left", "right", None], ["up", 5]),
    "truncate_prompt_tokens": ([None, -1, 5], ["x", -2, 1.5, []]),
    "stream_options": ([None], [5, "x", [], {"include_usage": 5}]),
    "user": ([None, "a", 5, {"a": []}], []),
    "metadata": ([None, {"a": "b"}], []),
    "store": ([None, False], []),
    "kv_transfer_params": ([None], [{}, {"a": 1}, 5]),
    "vllm_xargs": ([None], [{"a": 1}]),
    "response_format": ([None, {"type": "text"}], [5, "x", {"type": "zz"}, {"type": 5}, []]),
    "logprobs_mode": ([None], ["zz", 5]),
    "best_of": ([None], [0, "x", 10**6, []]),
    "unknown_to_all": ([1, None, {"a": [1]}], []),
}
OWN: dict[str, dict[str, Values]] = {
    COMPLETIONS: {
        "logprobs": ([None, 0, 3], [-2, "x", 10**6, 1.5, []]),
        "echo": ([True, False, None], ["x", 5]),
        "suffix": ([None, ""], ["x", 5]),
        "prompt_embeds": ([None], ["x"]),
        "messages": ([None], [[{"role": "user", "content": "a"}], 5]),
    },
    CHATS: {
        "logprobs": ([None, True, False], ["x", 5, [], {}]),
        "tools": ([None, []], [5, "x", [5], [{}], [{"type": "function"}], {"a": 1}]),
        "parallel_tool_calls": ([None, True, False], ["x", 5]),
        "tool_choice": ([None, "none", "auto"], [5, "zz", {"type": "zz"}, {"type": "function"}]),
        "chat_template": ([None], ["{{ 1 }}", 5]),
        "chat_template_kwargs": ([None, {}, {"a": 1}], [5, "x", [1]]),
        "documents": ([None, []], [5, "x"]),
        "add_generation_prompt": (_FLAGS[0], ["x", 5]),
        "reasoning_effort": ([None, "low", "none"], [5, []]),
        "include_reasoning": _FLAGS,
        "modalities": ([None, ["text"]], [["audio"], 5]),
        "functions": ([None, []], [[{"name": "a"}]]),
        "function_call": ([None, "none"], ["auto", {"name": "a"}]),
        "audio": ([None], [{"voice": "a"}]),
        "prompt": ([None], ["x", [1]]),
    },
}
PROMPTS: Values = (
    ["import os\n", "é漢字", ["a", "b c"], [5, 6], [[5], [6, 7]], " "],
    [None, 5, {}, [], [[]], [""], "", [None], [-1], [VOCABULARY], [True], ["a", 5], [1.5], [[[1]]]],
)
_USER = {"role": "user", "content": "import os"}
CHAT_TEXTS: Values = (
    [
        [_USER],
        [{"role": "system", "content": "é"}, _USER],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [_USER, {"role": "assistant", "content": "b"}, _USER],
    ],
    [
        *(None, 5, "x", {}, [], [5], [{}], [{"role": "zz", "content": "a"}], [{"role": 5}]),
        *([{"role": "user"}], [{"role": "user", "content": 5}], [[_USER]]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    ],
)
_OTHERS: dict[str, list[dict[str, Any]]] = {
    RESPONSES: [
        {"model": MODEL, "input": "import os", "max_output_tokens": 16},
        {"model": MODEL, "input": [_USER], "max_output_tokens": 16, "stream": True},
    ],
    MESSAGES: [
        {"model": MODEL, "messages": [_USER], "max_tokens": 4},
        {"model": MODEL, "messages": [_USER], "max_tokens": 4, "stream": True, "system": "é"},
    ],
    COUNT: [{"model": MODEL, "messages": [_USER]}],
    "/tokenize": [{"prompt": "import os"}, {"messages": [_USER]}],
    "/detokenize": [{"tokens": [5, 6]}],
    "/v1/embeddings": [{"input": "a"}],
}
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**70, 1e308, "", "x", _LONG, "\ud800", "\x00", [], {}, [[]]),
    *([None], {"": None}, {"type": "zz"}, [{"type": 5}], [{"role": "user", "content": [5]}]),
)
_HEADERS: tuple[bytes, ...] = (
    *(b"Content-Type: text/plain", b"Content-Type: multipart/form-data; boundary=a"),
    *(b"Content-Encoding: gzip", b"Expect: 100-continue", b"X-Request-Id: \xff\xfe"),
    *(b"Authorization: Bearer \xff", b"Origin: null", b"Accept: nothing/here"),
    *(b"X-Request-Id: " + b"a" * 3000, b"Content-Length: 5", b"Content-Length: -1"),
    *(b"Transfer-Encoding: chunked", b"Connection: close, close", b"Upgrade: websocket"),
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
)
_DRAWN = {*BOTH, *OWN[COMPLETIONS], *OWN[CHATS]}
_REST = sorted(TABLES[CHAT].keys() - _DRAWN)
_LINES: tuple[bytes, ...] = (
    *(b"GET", b"GET / HTTP/9.9", b"\x16\x03\x01\x02\x00", b"POST /v1/completions", b"\r\n\r\n"),
    *(
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
        b"POST  /v1/completions HTTP/1.1",
        b"PRI * HTTP/2.0",
    ),
    *(b"GET /%ff%fe HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1", b"GET http://a/ HTTP/1.1"),
)
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "ZZ")


@dataclass
class Case:
    """A request; the param of its error must be one of `faults`, if there are any."""

    method: str = "POST"
    path: str = COMPLETIONS
    data: bytes = b""
    headers: list[bytes] = field(default_factory=list)
    head: bytes = b""  # in place of the request line and all headers
    is_chunked: bool = False
    repeat: int = 1  # times on one connection, pipelined
    is_streaming: bool = False
    faults: list[str] = field(default_factory=list)
    is_changed: bool = False  # no outcome is known: only internal errors count

    def message(self) -> bytes:
        """Return the bytes of the request."""
        if self.head:
            return self.head + b"\r\nHost: a\r\n\r\n" + self.data
        lines = [f"{self.method} {self.path} HTTP/1.1".encode(), b"Host: a", *self.headers]
        data = self.data
        if self.is_chunked:
            lines.append(b"Transfer-Encoding: chunked")
            parts = [data[at : at + 37] for at in range(0, len(data), 37)]
            data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
        elif not any(each.startswith(b"Content-Length") for each in self.headers):
            lines.append(b"Content-Length: %d" % len(data))
        return (b"\r\n".join(lines) + b"\r\n\r\n" + data) * self.repeat


class _Draft:
    """A case while it is drawn."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.case = Case()

    def one(self, values: Any) -> Any:
        return self.draw(st.sampled_from(list(values)))

    def rarely(self, percent: int) -> bool:
        return 40 <= self.draw(st.integers(0, 99)) < 40 + percent

    def body(self) -> dict[str, Any]:
        """A body over the tables, with at most one bad value."""
        case = self.case
        if self.rarely(8):
            case.path = self.one(_SMALL)
        else:
            case.path = self.one(_PATHS)
        if case.path in _OTHERS:
            return self.other()
        is_chat = case.path == CHATS
        name, (good, bad) = ("messages", CHAT_TEXTS) if is_chat else ("prompt", PROMPTS)
        is_bad = self.rarely(10)
        body: dict[str, Any] = {name: self.one(bad if is_bad else good), "max_tokens": 3}
        if is_bad:
            case.faults.append(name)
        table = BOTH | OWN[case.path]
        names = self.draw(st.lists(st.sampled_from(sorted(table)), max_size=5, unique=True))
        wrong = self.one(names) if names and not is_bad and self.rarely(35) else ""
        for name in names:
            good, bad = table[name]
            is_bad = name == wrong and bool(bad)
            body[name] = self.one(bad if is_bad else good)
            if is_bad:
                case.faults.append(name)
        if self.rarely(10) and (name := self.draw(st.text(max_size=12))) not in TABLES[CHAT]:
            body[name] = self.one(_JUNK[:10])  # listed in a header, with any name
        if self.rarely(15):  # of any other field of the tables
            body[self.one(_REST)] = self.one(_JUNK)
            case.is_changed = True
        case.is_streaming = body.get("stream") is True
        return body

    def other(self) -> dict[str, Any]:
        """A body of another endpoint, maybe with junk in one of its fields."""
        case = self.case
        body = dict(self.one(_OTHERS[case.path]))
        case.is_streaming = body.get("stream") is True
        if case.path == "/v1/embeddings":
            case.faults.append("model")
        if self.rarely(50):
            fields = [
                *body,
                "temperature",
                "tools",
                "tool_choice",
                "model",
                "stream",
                "top_p",
                "zz",
            ]
            body[self.one(fields)] = self.one(_JUNK)
            case.is_changed = True
        return body

    def text(self, body: dict[str, Any]) -> bytes:
        """The body's text, maybe no longer JSON, or JSON that nobody means."""
        text = json.dumps(body)
        if not self.rarely(20):
            return text.encode()
        self.case.is_changed = True
        kind = self.one(("cut", "bytes", "deep", "twice", "huge", "surrogate", "nothing", "nan"))
        inner = text[1:-1] or '"a":1'
        match kind:
            case "cut":
                return text[: self.draw(st.integers(0, len(text) - 1))].encode()
            case "bytes":
                at, put = self.draw(st.integers(0, len(text))), self.draw(st.binary(max_size=6))
                return text[:at].encode() + put + text[at + len(put) :].encode()
            case "deep":
                opened = self.one((_DEEP, '{"a":' * 3000, _DEEP + "]" * 3000, "[" * 90 + "]" * 90))
                return f'{{{inner},"zz":{opened}}}'.encode()
            case "twice":
                return f"{{{inner},{inner}}}".encode()
            case "huge":
                name = self.one(("max_tokens", "seed", "temperature", "n", "top_k"))
                return f'{{{inner},"{name}":{self.one(("1e999", "9" * 4000, "-1e-999"))}}}'.encode()
            case "surrogate":
                name = self.one(("prompt", "stop", "model", "zz", "user", "messages"))
                return f'{{{inner},"{name}":"\\ud800a"}}'.encode()
            case "nan":
                return f'{{{inner},"temperature":{self.one(("NaN", "Infinity", "-0"))}}}'.encode()
        return self.one((b"", b"null", b"[]", b"5", b'"x"', b"\xff\xfe{}", b"\xef\xbb\xbf{}"))

    def around(self) -> None:
        """The request around the body."""
        case = self.case
        if self.rarely(4):
            case.head, case.is_changed = self.one(_LINES), True
        elif self.rarely(6):
            case.headers, case.is_changed = [self.one(_HEADERS)], True
        elif self.rarely(4):
            case.method, case.is_changed = self.one(_METHODS), True
        elif self.rarely(4):
            case.method, case.path, case.data = "GET", self.one(_GETS), b""
            case.faults, case.is_changed = [], True
        elif self.rarely(2):
            case.path, case.is_changed = self.one(("/v1", "/v1/zz", "/v1/completions/", "//")), True
        elif self.rarely(6):
            case.repeat = 3
        case.is_chunked = case.method == "POST" and not case.headers and self.rarely(10)


@st.composite
def _cases(draw: Any) -> Case:
    draft = _Draft(draw)
    draft.case.data = draft.text(draft.body())
    draft.around()
    return draft.case


def cases(count: int, number: int) -> Iterator[Case]:
    """So many requests; the same for the same number, in any process."""
    return drawn(_cases(), count, number)
