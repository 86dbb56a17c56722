"""The sixty bad inputs, by number: what is sent, and what comes back. Data; see test_sixty.py.

What tritonserver answers by itself, in its own words and with HTTP status 500 where it cannot
parse, is in sixty_ask.py; the model's own answers begin with INVALID_ARGUMENT.
"""

import gzip
import json
import zlib

import numpy as np
from server.sixty_cases import (
    BY_SERVER,
    CLOSED,
    Beside,
    Call,
    Grpc,
    Http,
    Item,
    Raw,
    chunked,
    in_turn,
    post,
    text,
    vllm,
)

I32 = np.int32
BIG = "x = 1\n"
GZIP, DEFLATE = gzip.compress(bytes(10**7)), zlib.compress(bytes(10**7))
LONG = r"INVALID_ARGUMENT: text_input has \d+ bytes, at least \d+ tokens; the context has 2048"
TOO_LONG = "the prompt is {} tokens long: .*does not fit the context of 2048 tokens"
TOO_MUCH = "the prompt is {} tokens long: .*needs {} blocks, the KV cache has 48 .1536 tokens"
WHOLE = "not a whole number from 1 to 2147483647"
NO_CHAT = (
    "There is no chat endpoint: a client applies the template. What is sent instead is refused."
)
NO_PROTOBUF = "Unable to parse request"
OF_JSON = "It is about JSON; of gRPC's bytes that are no message see item 2."
OF_HTTP = "It is about HTTP's own framing; gRPC's is its library's."
BYTES = "is not valid UTF-8 at byte {}: b'{}'"
ROLE = Beside(messages=[{"role": "user"}])


def prompt(size: int) -> Beside:
    """So many token ids."""
    return Beside(input_ids=[5] * size, input_lengths=size)


def ids(value: str) -> bytes:
    """A body for tensorrt_llm with a token id as it is written."""
    body = '{"input_ids": [5, %s], "input_lengths": 2, "request_output_len": 1}'
    return (body % value).encode()


SIXTY: dict[int, Item] = {
    1: Item(
        "empty body",
        (
            Http("{m}", b"", 500, "The document is empty"),
            Call("ModelInfer", b"", "NOT_FOUND", "unknown model: ''"),
        ),
    ),
    2: Item(
        "bad JSON",
        (
            Http("{m}", b"{bad json", 500, "failed to parse .* at 1"),
            Call("ModelInfer", b"{bad json", "INTERNAL", NO_PROTOBUF),
            Call("ModelStreamInfer", b"{bad json", "OK"),
        ),
        "A stream of bytes that are no message ends with OK, without a word: gRPC's library.",
    ),
    3: Item(
        "JSON that is no object",
        tuple(Http("{m}", body, 500, "non-object") for body in (b"[]", b'"a"', b"5", b"null")),
        alone=OF_JSON,
    ),
    4: Item(
        "250,000 levels of nesting",
        (
            Http("{m}", b"[" * 250_000 + b"]" * 250_000, 500, "non-object"),
            Http("{m}", b'{"a":' * 250_000, 500, "failed to parse"),
            Http("ensemble", b"[" * 10_000_000, 500, "nested too deeply"),
            Http("ensemble", b'{"a":' + b"[" * 30_000_000, 500, "nested too deeply"),
            Raw(
                post("Content-Length: 10000000\r\n", b"[" * 10_000_000, "preprocessing/infer"),
                500,
                "nested too deeply",
            ),
            Http(
                "{v}",
                {"text_input": "a", "sampling_parameters": "[" * 250_000},
                400,
                "sampling_parameters is not JSON: it is nested too deeply",
            ),
        ),
    ),
    5: Item("a body of 72 MB", (Http("ensemble", text(text_input=BIG * 12_000_000), 400, LONG),)),
    6: Item(
        "the same in chunks, no length",
        (Raw(chunked(json.dumps(text(text_input=BIG * 2_000_000)).encode(), 65536), 400, LONG),),
        alone=OF_HTTP,
    ),
    7: Item(
        "100,000 chunks of a byte",
        (Raw(chunked(b"[" + b" " * 100_000, 1), 500, "failed to parse .* at 100001"),),
        alone=OF_HTTP,
    ),
    8: Item(
        "Content-Length -1, abc, or two",
        (
            Raw(post("Content-Length: -1\r\n", b"{}"), CLOSED),
            Raw(post("Content-Length: abc\r\n", b"{}"), CLOSED),
            # Enough for the longer one: it does not wait for more, whichever counts.
            Raw(
                post("Content-Length: 2\r\nContent-Length: 90\r\n", b"{}" + b" " * 88),
                400,
                "text_input",
            ),
        ),
        alone=OF_HTTP,
    ),
    9: Item(
        "headers above 32 KiB, 1,000 headers",
        (
            Raw(post(f"X-Long: {'h' * 40_000}\r\nContent-Length: 2\r\n", b"{}"), CLOSED),
            Raw(post("X-Many: 1\r\n" * 1000 + "Content-Length: 2\r\n", b"{}"), 400, "text_input"),
            Call("ServerLive", b"", "RESOURCE_EXHAUSTED", "metadata", (("x-long", "h" * 40_000),)),
        ),
        "Many headers are read: their sum is bounded, not their number.",
    ),
    10: Item("slowloris", why="50 connections with half a header are open while others are served"),
    11: Item(
        "wrong Content-Type, compressed bodies",
        (
            Raw(post("Content-Type: text/html\r\nContent-Length: 2\r\n", b"{}"), 400, "text_input"),
            Raw(
                post(f"Content-Encoding: gzip\r\nContent-Length: {len(GZIP)}\r\n", GZIP),
                400,
                "content-encoding, only 'identity'",
            ),
            *(
                Raw(
                    post(
                        f"Content-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n",
                        body,
                        f"{path}/infer",
                    ),
                    500,
                    "Content-Encoding must be identity: no body is decompressed",
                )
                for path in ("preprocessing", "postprocessing", "preprocessing/versions/1")
                for coding, body in (("gzip", GZIP), ("deflate", DEFLATE))
            ),
            Raw(
                post("Content-Encoding: br\r\nContent-Length: 2\r\n", b"{}"),
                400,
                "content-encoding, only 'identity'",
            ),
            *(
                Call(method, bytes(10**7), "INTERNAL", f"messages are refused.* is {coding}", asks)
                for method in ("ModelInfer", "ModelStreamInfer", "ServerLive")
                for coding in ("gzip", "deflate")
                for asks in [(("grpc-internal-encoding-request", coding),)]
            ),
        ),
    ),
    12: Item(
        "invalid UTF-8",
        (
            Http(
                "{x}",
                b'{"text_input": "a\xff", "max_tokens": 3}',
                400,
                "text_input " + BYTES.format(1, r"a\\xff"),
            ),
            *(
                Http(
                    "{t}",
                    b'{"text_input": "a", "max_tokens": 3, "%s": ["a", "\xff"]}' % field.encode(),
                    400,
                    rf"{field}\[1\] " + BYTES.format(0, r"\\xff"),
                )
                for field in ("stop_words", "bad_words")
            ),
        ),
    ),
    13: Item(
        "lone surrogate",
        (
            Http("{m}", rb'{"text_input": "a\ud83d", "max_tokens": 3}', 500, "surrogate pair"),
            Http("{v}", vllm(stop="\ud83d"), 400, r"stop\[0\] is not valid UTF-8.*ud83d"),
        ),
    ),
    14: Item("NUL in a text", why="it is a character like others, and echoed"),
    15: Item(
        "unknown path, wrong verb",
        (
            Raw(b"GET /v3/nothing HTTP/1.1\r\nHost: x\r\n\r\n", 404, "Not Found"),
            Raw(
                b"DELETE /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n\r\n",
                405,
                "Method Not Allowed",
            ),
            Raw(
                b"GET /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n\r\n",
                405,
                "Method Not Allowed",
            ),
            Call("Nothing", b"", "UNIMPLEMENTED"),
        ),
    ),
    16: Item(
        "duplicate JSON keys",
        (
            Http(
                "{t}",
                b'{"text_input": "a", "text_input": "b", "max_tokens": 3}',
                400,
                "'text_input' already",
            ),
            Http("{v}", b'{"text_input": "a", "text_input": "b"}', 400, "'text_input' already"),
            Http(
                "tensorrt_llm",
                b'{"input_ids": 5, "input_lengths": 1, "input_lengths": 1}',
                400,
                "'input_lengths' already",
            ),
            Http(
                "{v}",
                {"text_input": "a", "sampling_parameters": '{"n":1,"n":1}'},
                400,
                "sampling_parameters has 'n' twice",
            ),
        ),
    ),
    17: Item(
        "no model, unknown model",
        (
            Http("nope", text(), 404, "unknown model: 'nope'"),
            *(
                Grpc(model, {}, f"unknown model: '{model}'", code="NOT_FOUND", status=404)
                for model in ("nope", "tensorrt_llm_BLS")
            ),
            Grpc("", {}, "unknown model: ''", "a path without a name", code="NOT_FOUND"),
            Raw(b"POST /v2/models//generate HTTP/1.1\r\nHost: x\r\n\r\n", 404, "error"),
        ),
    ),
    18: Item(
        "a model like ../../etc/passwd, or of 10 KB",
        (
            Http("../../etc/passwd", text(), 404, "^Not Found$", "the path has no model"),
            Http("..%2f..%2fetc%2fpasswd", text(), 404, "unknown model"),
            Http("x" * 1000, text(), 404, "unknown model: 'xxx"),
            Raw(b"POST /v2/models/%s/generate HTTP/1.1\r\n\r\n" % (b"x" * 10_000), CLOSED),
            *(
                Grpc(model, {}, f"unknown model: '{model[:9]}", "see above", code="NOT_FOUND")
                for model in ("../../etc/passwd", "x" * 10_000)
            ),
        ),
        "The server repeats a model's name as it is: it has refused before a model sees it.",
    ),
    19: Item("messages", (Http("{m}", ROLE, 400, "parameter '?messages'"),), NO_CHAT),
    20: Item("roles", (Http("{m}", Beside(role="king"), 400, "parameter 'role'"),), NO_CHAT),
    21: Item(
        "content that is no text",
        tuple(
            Http("{x}", Beside(text_input=value), 500, "Unable to parse")
            for value in (5, True, None, {"a": 1})
        ),
        NO_CHAT,
    ),
    22: Item(
        "image, audio and file parts",
        (
            Http(
                "tensorrt_llm_bls",
                Beside(image_url_input="http://x/"),
                400,
                "image_url_input is not supported yet: it is b'http://x/', leave it out",
            ),
            Http(
                "{v}",
                Beside(image=["aGk="]),
                400,
                "image is not supported yet: it is b'aGk=', leave it out",
            ),
            Http("{m}", Beside(image_url="http://x/"), 400, "parameter 'image_url'"),
        ),
        NO_CHAT,
    ),
    23: Item(
        "100,000 messages",
        (Http("{m}", Beside(messages=[{}] * 100_000), 400, "parameter 'messages'"),),
        NO_CHAT,
    ),
    24: Item("no template", why=f"{NO_CHAT} tests/stages/test_chat.py tests the library."),
    25: Item(
        "a template that raises", why=f"{NO_CHAT} tests/stages/test_chat.py tests the library."
    ),
    26: Item(
        "a template in the request",
        (
            Http(
                "{n}",
                Beside(chat_template="{{ 7 }}"),
                400,
                "unknown request parameter 'chat_template'",
            ),
            *(
                Http(
                    "{v}",
                    vllm(**{name: "{{ 7 }}"}),
                    400,
                    f"unknown request parameter '{name}'",
                )
                for name in ("chat_template", "chat_template_kwargs")
            ),
        ),
        NO_CHAT,
    ),
    27: Item(
        "prompt empty, none, 10,000",
        (
            Http("{x}", Beside(text_input=""), 400, "text_input is empty"),
            Http("{x}", Beside(text_input=[]), 400, "'text_input'"),
            Http(
                "{t}",
                text(text_input=["a"] * 10_000, max_tokens=[1] * 10_000),
                400,
                "batch-size must be <= 64",
            ),
            Http(
                "{v}",
                Beside(text_input=["a"] * 10_000),
                400,
                "shape.*'text_input'|'text_input'.*shape",
            ),
            Http("tensorrt_llm", prompt(0), 400, "input_"),
        ),
    ),
    28: Item(
        "prompt token ids out of range",
        tuple(
            Http("tensorrt_llm", ids(value), 500 if expected == BY_SERVER else 400, expected)
            for value, expected in {
                "-1": r"input_ids\[1\] is -1, not a token id from 0 to 2147483647",
                "4096": "input_ids: token id 4096 is outside the vocabulary 0 .. 4095",
                "2147483647": "input_ids: token id 2147483647 is outside .* 0 .. 4095",
            }.items()
        )
        + tuple(
            Http("tensorrt_llm", ids(value), 500, "Unable to parse 'data'")
            for value in ("true", "0.5", '"5"', "9223372036854775808")
        ),
    ),
    29: Item(
        "prompt longer than the context",
        (
            Http("{x}", Beside(text_input=BIG * 2000), 400, TOO_LONG.format(8000)),
            Http("tensorrt_llm", prompt(2048), 400, TOO_LONG.format(2048)),
        ),
    ),
    30: Item(
        "prompt above the KV cache though within the context",
        (
            Http("tensorrt_llm", prompt(2047), 400, TOO_MUCH.format(2047, 64)),
            Http("{x}", Beside(text_input=BIG * 450), 400, TOO_MUCH.format(1800, 57)),
        ),
    ),
    31: Item(
        "a prompt of 27 MB",
        (
            Http("{x}", Beside(text_input=BIG * 4_500_000), 400, LONG),
            Http("tensorrt_llm", prompt(100_000), 400, TOO_LONG.format(100000)),
            Grpc(
                "tensorrt_llm",
                {
                    "input_ids": np.ones((1, 6_750_000), I32),
                    "input_lengths": np.array([[6_750_000]], I32),
                },
                TOO_LONG.format(6750000),
                "HTTP: see the one before",
            ),
        ),
    ),
    32: Item(
        "max_tokens 0, -1, 1.5, text, 2^31, 2^63",
        (
            *in_turn(
                "max_tokens",
                {
                    "0": f"max_tokens.* is 0, {WHOLE}",
                    "-1": f"max_tokens.* is -1, {WHOLE}",
                    "1.5": BY_SERVER,
                    '"5"': BY_SERVER,
                    "true": BY_SERVER,
                    # The server wraps it: see docs/clients.md.
                    "2147483648": f"max_tokens.* is -2147483648, {WHOLE}",
                    "9223372036854775808": BY_SERVER,
                },
            ),
            *in_turn(
                "max_tokens",
                {
                    "0": f"max_tokens is 0, {WHOLE}",
                    "-1": f"max_tokens is -1, {WHOLE}",
                    "1.5": "max_tokens is 1.5, not a whole number",
                    '"x"': "max_tokens is 'x', not a whole number",
                    "true": "max_tokens is True, not a whole number",
                    "2147483648": f"max_tokens is 2147483648, {WHOLE}",
                    "9223372036854775808": f"max_tokens is 9223372036854775808, {WHOLE}",
                },
                "{v}",
            ),
        ),
    ),
    33: Item(
        "max_tokens and max_completion_tokens",
        (
            Http(
                "{n}",
                Beside(max_completion_tokens=0),
                400,
                f"max_completion_tokens is 0, {WHOLE}",
            ),
            Http(
                "{v}",
                vllm(max_completion_tokens="many", max_tokens=3),
                400,
                "max_completion_tokens is 'many', not a whole number",
            ),
        ),
        "the smaller of the two holds: see test_33 of test_sixty.py",
    ),
}
