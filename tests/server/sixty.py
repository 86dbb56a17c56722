"""The sixty bad inputs, by number: what is sent, and what comes back. Data; see test_sixty.py.

`{m}` in a path is every model that generates, `{t}` those that take the ensemble's tensors, `{v}`
vllm_model. What tritonserver answers by itself, in its own words and with HTTP status 500 where it
cannot parse, is marked by SERVER; the model's own answers begin with INVALID_ARGUMENT.
"""

import gzip
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model", "tensorrt_llm")
TEXTS = MODELS[:2]
SERVER = ""  # any error text will do; the status is told
OURS = "INVALID_ARGUMENT: "


@dataclass(frozen=True)
class Http:
    """A body for `generate` and `generate_stream`. `expected` is a regular expression."""

    path: str  # a model, or {m}, {t}, {v}
    body: Any
    status: int
    expected: str = SERVER


@dataclass(frozen=True)
class Grpc:
    """Tensors beside, or in the place of, those of a good request; None leaves one out."""

    model: str
    tensors: dict[str, Any]
    expected: str = SERVER
    parameters: dict[str, Any] | None = None
    request_id: str = ""


@dataclass(frozen=True)
class Raw:
    """Bytes on the HTTP port. Status 0: the connection is closed, or the server waits for more."""

    data: bytes
    statuses: tuple[int, ...]
    patience_s: float = 20.0


@dataclass(frozen=True)
class Item:
    """One of the sixty. `why`: what it comes to here where that is another thing than an answer."""

    what: str
    cases: tuple[Http | Grpc | Raw, ...] = ()
    why: str = ""


def text(**extra: Any) -> dict[str, Any]:
    """A good body of all text models, with something in it."""
    return {"text_input": "def f(", "max_tokens": 3} | extra


def vllm(**sampling: Any) -> dict[str, Any]:
    """A body of vllm_model with sampling parameters."""
    return {"text_input": "def f(", "sampling_parameters": json.dumps(sampling)}


def raw_json(**fields: str) -> bytes:
    """A good body whose fields are put in as they are written."""
    extra = "".join(f', "{name}": {value}' for name, value in fields.items())
    return ('{"text_input": "def f("' + extra + "}").encode()


def post(headers: str, body: bytes = b"") -> bytes:
    """A request to the ensemble."""
    start = f"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n{headers}\r\n"
    return start.encode() + body


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks."""
    parts = (body[at : at + size] for at in range(0, len(body), size))
    data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return post("Transfer-Encoding: chunked\r\n", data + b"0\r\n\r\n")


def over_http(field: str, values: dict[str, str], model: str = "{t}") -> tuple[Http, ...]:
    """A field in turn with every value, as JSON is written, and what the refusal says."""
    cases = []
    for value, expected in values.items():
        fields = {"max_tokens": "3"} | {field: value}
        if model == "{v}":
            body: Any = {"text_input": "def f(", "sampling_parameters": f'{{"{field}": {value}}}'}
        else:
            body = raw_json(**fields)
        status = 500 if expected == SERVER else 400
        cases.append(Http(model, body, status, f"{OURS}.*{expected}" if expected else SERVER))
    return tuple(cases)


I32, F32 = np.int32, np.float32
BIG = "x = 1\n"
LONG = "INVALID_ARGUMENT: .*bytes, .* tokens; the context has 2048"
WHOLE = "not a whole number from 1 to 2147483647"
NO_CHAT = (
    "There is no chat endpoint: a client applies the template. What is sent instead is refused."
)
IDS = np.array([[5, 6, 7]], I32)
TOO_LONG = {"input_ids": np.ones((1, 2047), I32), "input_lengths": np.array([[2047]], I32)}

SIXTY: dict[int, Item] = {
    1: Item("empty body", (Http("{m}", b"", 500, "The document is empty"),)),
    2: Item("bad JSON", (Http("{m}", b"{bad json", 500, "failed to parse .* at 1"),)),
    3: Item(
        "JSON that is no object",
        tuple(Http("{m}", body, 500, "non-object") for body in (b"[]", b'"a"', b"5", b"null")),
    ),
    4: Item(
        "250,000 levels of nesting",
        (
            Http("{m}", b"[" * 250_000 + b"]" * 250_000, 500, "non-object"),
            Http("{m}", b'{"a":' * 250_000, 500, "failed to parse"),
            Http("{v}", {"text_input": "a", "sampling_parameters": "[" * 250_000}, 400, "not JSON"),
        ),
    ),
    5: Item("a body of 72 MB", (Http("ensemble", text(text_input=BIG * 12_000_000), 400, LONG),)),
    6: Item(
        "the same in chunks, no length",
        (Raw(chunked(json.dumps(text(text_input=BIG * 2_000_000)).encode(), 65536), (400,)),),
    ),
    7: Item("100,000 chunks of a byte", (Raw(chunked(b"[" + b" " * 100_000, 1), (400, 500)),)),
    8: Item(
        "Content-Length -1, abc, or two",
        tuple(
            Raw(post(headers, b"{}"), (0, 400, 500), 1.0)
            for headers in (
                "Content-Length: -1\r\n",
                "Content-Length: abc\r\n",
                "Content-Length: 2\r\nContent-Length: 90\r\n",
            )
        ),
    ),
    9: Item(
        "headers above 32 KiB, 1,000 headers",
        (
            Raw(
                post(f"X-Long: {'h' * 40_000}\r\nContent-Length: 2\r\n", b"{}"), (0, 400, 431, 500)
            ),
            Raw(
                post("X-Many: 1\r\n" * 1000 + "Content-Length: 2\r\n", b"{}"),
                (0, 400, 431, 500),
                1.0,
            ),
        ),
    ),
    10: Item("slowloris", why="50 connections with half a header are open while others are served"),
    11: Item(
        "wrong Content-Type, compressed bodies",
        (
            Raw(post("Content-Type: text/html\r\nContent-Length: 2\r\n", b"{}"), (400, 500)),
            Raw(
                post(
                    f"Content-Encoding: gzip\r\nContent-Length: {len(gzip.compress(bytes(10**7)))}"
                    "\r\n",
                    gzip.compress(bytes(10**7)),
                ),
                (400, 415, 500),
            ),
            Raw(post("Content-Encoding: br\r\nContent-Length: 2\r\n", b"{}"), (400, 415, 500)),
        ),
    ),
    12: Item(
        "invalid UTF-8",
        (
            Http("{t}", b'{"text_input": "a\xff", "max_tokens": 3}', 400, "text_input .* byte 1"),
            Http("{v}", b'{"text_input": "a\xff"}', 400, "text_input .* byte 1"),
            *(Grpc(m, {"text_input": b"a\xff"}, "text_input .* byte 1") for m in MODELS[:3]),
            *(Grpc(m, {"stop_words": [b"\xff"]}, r"stop_words\[0\].* byte 0") for m in TEXTS),
        ),
    ),
    13: Item(
        "lone surrogate",
        (
            Http("{m}", rb'{"text_input": "a\ud83d", "max_tokens": 3}', 500, "surrogate pair"),
            Http("{v}", vllm(stop="\ud83d"), 400, r"stop\[0\] is not valid UTF-8"),
        ),
    ),
    14: Item("NUL in a text", why="it is a character like others, and echoed"),
    15: Item(
        "unknown path, wrong verb",
        (
            Raw(b"GET /v3/nothing HTTP/1.1\r\nHost: x\r\n\r\n", (400, 404)),
            Raw(b"DELETE /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n\r\n", (400, 405)),
            Raw(b"GET /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n\r\n", (400, 405)),
        ),
    ),
    16: Item(
        "duplicate JSON keys",
        (
            Http("{t}", b'{"text_input": "a", "text_input": "b", "max_tokens": 3}', 400, "already"),
            Http("{v}", b'{"text_input": "a", "text_input": "b"}', 400, "already"),
            Http("{v}", {"text_input": "a", "sampling_parameters": '{"n":1,"n":1}'}, 400, "twice"),
        ),
    ),
    17: Item(
        "no model, unknown model",
        (Http("nope", text(), 404, "'nope'"), Grpc("nope", {}, "'nope'"), Grpc("", {}, "''")),
    ),
    18: Item(
        "a model like ../../etc/passwd, or of 10 KB",
        (
            Http("../../etc/passwd", text(), 404),
            Http("..%2f..%2fetc%2fpasswd", text(), 404),
            Http("x" * 1000, text(), 404),
            Raw(
                b"POST /v2/models/%s/generate HTTP/1.1\r\n\r\n" % (b"x" * 10_000),
                (0, 400, 404, 414),
            ),
            Grpc("../../etc/passwd", {}, "not found"),
        ),
    ),
    19: Item(
        "messages", (Http("{m}", text(messages=[{"role": "user"}]), 400, "messages"),), NO_CHAT
    ),
    20: Item("roles", (Http("{m}", text(role="king"), 400, "role|max_tokens"),), NO_CHAT),
    21: Item("content that is no text", (Http("{m}", text(text_input=5), 500),), NO_CHAT),
    22: Item(
        "image, audio and file parts",
        (
            Grpc(
                "tensorrt_llm_bls", {"image_url_input": b"http://x/"}, "image_url_input .*support"
            ),
            Grpc("vllm_model", {"image": [b"aGk="]}, "image .*not supported"),
            Http("{t}", text(image_url="http://x/"), 400, "image_url"),
        ),
        NO_CHAT,
    ),
    23: Item(
        "100,000 messages", (Http("{t}", text(messages=[{}] * 100_000), 400, "messages"),), NO_CHAT
    ),
    24: Item("no template", why=f"{NO_CHAT} tests/stages/test_chat.py tests the library."),
    25: Item(
        "a template that raises", why=f"{NO_CHAT} tests/stages/test_chat.py tests the library."
    ),
    26: Item(
        "a template in the request",
        (Http("{t}", text(chat_template="{{ 7 }}"), 400, "unknown .*'chat_template'"),),
        NO_CHAT,
    ),
    27: Item(
        "prompt empty, none, 10,000",
        (
            Http("{t}", text(text_input=""), 400, "text_input is empty"),
            Http("{v}", {"text_input": ""}, 400, "text_input is empty"),
            Http("{t}", text(text_input=[]), 400, "text_input"),
            Http("{t}", text(text_input=["a"] * 10_000, max_tokens=[1] * 10_000), 400, "<= 64"),
            *(Grpc(m, {"text_input": b""}, "text_input is empty") for m in MODELS[:3]),
        ),
    ),
    28: Item(
        "prompt token ids out of range",
        (
            *(
                Grpc(
                    "tensorrt_llm",
                    {"input_ids": np.array([[5, value, 7]], I32)},
                    f"input_ids.*{value}",
                )
                for value in (-1, 4096, 2**31 - 1)
            ),
            *(
                Http(
                    "tensorrt_llm",
                    b'{"input_ids": [5, %s], "input_lengths": 2, "request_output_len": 1}'
                    % value.encode(),
                    status,
                    expected,
                )
                for value, status, expected in (
                    ("-1", 400, r"input_ids\[1\] is -1"),
                    ("4096", 400, "input_ids: token id 4096 .* 0 .. 4095"),
                    ("true", 500, SERVER),
                    ("0.5", 500, SERVER),
                    ("9223372036854775808", 500, SERVER),
                )
            ),
        ),
    ),
    29: Item(
        "prompt longer than the context",
        (
            Http("{t}", text(text_input=BIG * 2000), 400, "12000 .*2048|2048.*12000|tokens.* 2048"),
            Grpc(
                "tensorrt_llm",
                {"input_ids": np.ones((1, 2048), I32), "input_lengths": np.array([[2048]], I32)},
                "2048 tokens .* context of 2048",
            ),
        ),
    ),
    30: Item(
        "prompt above the KV cache though within the context",
        (
            Grpc("tensorrt_llm", TOO_LONG, "2047 tokens .* the KV cache has 48 .*1536 tokens"),
            Http("{t}", text(text_input=BIG * 450), 400, "the KV cache has 48 "),
        ),
    ),
    31: Item("a prompt of 27 MB", (Http("{m}", text(text_input=BIG * 4_500_000), 400, LONG),)),
    32: Item(
        "max_tokens 0, -1, 1.5, text, 2^31, 2^63",
        (
            *over_http(
                "max_tokens",
                {
                    "0": f"max_tokens.* is 0, {WHOLE}",
                    "-1": f"max_tokens.* is -1, {WHOLE}",
                    "1.5": SERVER,
                    '"5"': SERVER,
                    "true": SERVER,
                    # The server wraps it: see docs/clients.md.
                    "2147483648": f"max_tokens.* is -2147483648, {WHOLE}",
                    "9223372036854775808": SERVER,
                },
            ),
            *over_http(
                "max_tokens",
                {
                    "0": f"max_tokens is 0, {WHOLE}",
                    "1.5": "max_tokens is 1.5, not a whole",
                    "true": "max_tokens is True",
                    "2147483648": f"max_tokens is 2147483648, {WHOLE}",
                    "9223372036854775808": f"max_tokens is 9223372036854775808, {WHOLE}",
                },
                "{v}",
            ),
            *(Grpc(m, {"max_tokens": v}, f"max_tokens.*{v}") for m in TEXTS for v in (0, -1)),
            Grpc("tensorrt_llm", {"request_output_len": 0}, "request_output_len.* is 0"),
        ),
    ),
    33: Item(
        "max_tokens and max_completion_tokens",
        (Http("{t}", text(max_completion_tokens=5), 400, "unknown .*'max_completion_tokens'"),),
    ),
}
