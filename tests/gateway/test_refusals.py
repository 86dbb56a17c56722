"""Requests that cannot be served: a status before any token, in OpenAI's shape, by field."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.gateway.served import MODEL, ROOT, Gateway, Response
from hypothesis import given, settings
from hypothesis import strategies as st

MESSAGES = [{"role": "user", "content": "a"}]

COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": "a " * 5000}, "prompt"),
    ({"prompt": ["a"] * 513}, "prompt"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 100000}, "n"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": 3}, "stop"),
    ({"prompt": "a", "stop_token_ids": [5000]}, "stop_token_ids"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5000": 1}}, "logit_bias"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": 1}, "stream_options"),
    ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "a", "priority": 10}, "priority"),
    ({"prompt": "a", "timeout_ms": -1}, "timeout_ms"),
    ({"prompt": "a", "cache_salt": 3}, "cache_salt"),
    ({"prompt": "a", "seed": 1 << 63}, "seed"),
    ({"prompt": "a", "request_id": ""}, "request_id"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "a", "truncation_side": "middle", "truncate_prompt_tokens": 1}, "truncation_side"),
    ({"prompt": "a", "messages": MESSAGES}, "messages"),
    ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"prompt": "a", "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "a", "guided_regex": "("}, "guided_regex"),
    ({"prompt": "a", "model": 3}, "model"),
    ({"prompt": "a", "allowed_token_ids": [5], "bad_words": ["%"]}, None),  # no token is left
]

CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages"),
    ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": 2}, "logprobs"),
    ({"messages": MESSAGES, "prompt": "a"}, "prompt"),
    ({"messages": [{"role": "tool"}]}, "messages[0].content"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "function_call": {"name": "f"},
                    "tool_calls": [{"function": {"name": "f"}}],
                }
            ]
        },
        "messages[0].function_call",
    ),
    ({"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities"),
    ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": MESSAGES, "chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "thinking_token_budget": -1}, "thinking_token_budget"),
    ({"messages": MESSAGES, "thinking_token_budget": 1 << 31}, "thinking_token_budget"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "tools": 3}, "tools"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    (
        {
            "messages": MESSAGES,
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
    ),
    (
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        },
        "response_format",
    ),
    ({"messages": [{"role": "user", "content": "a " * 5000}]}, "messages"),
]


def check(found: Response, status: int = 400) -> dict[str, Any]:
    assert found.status == status, found.data
    assert found.headers["content-type"] == "application/json"
    assert found.headers["x-request-id"]
    error = found.error
    assert found.json.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("body", "param"), COMPLETIONS)
def test_completions(gateway: Gateway, body: dict[str, Any], param: str | None, is_streaming: bool):
    if is_streaming and "stream_options" not in body:
        body = {"stream": True, **body}
    error = check(gateway.complete(**body))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("body", "param"), CHATS)
def test_chats(gateway: Gateway, body: dict[str, Any], param: str | None, is_streaming: bool):
    body = {"stream": True, **body} if is_streaming else body
    error = check(gateway.post("/v1/chat/completions", body))
    assert error["param"] is None or error["param"].startswith(param or ""), error


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "array"),
        (b'"a"', "string"),
        (b"null", "JSON of type null"),
        (b"\xff", "not JSON"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested"),
        (b"[" * 100_000, ""),
        (b'{"prompt": "a", "max_tokens": 1, "prompt": "a"}', "'prompt' is given twice"),
        (b'{"prompt": "a", "logit_bias": {"5": 1, "\\u0035": 2}}', "'5' is given twice"),
        (b'{"prompt": "a", "tools": [1e99, {"a": {}, "b": {}, "a": 99}]}', "twice"),
    ],
)
def test_bodies_that_are_no_objects(gateway: Gateway, data: bytes, words: str):
    assert words in check(gateway.post("/v1/completions", data))["message"]


def test_models(gateway: Gateway):
    error = check(gateway.complete(model="gpt-4", prompt="a"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL in error["message"]
    assert check(gateway.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    assert check(gateway.complete(prompt="a", lora_name="zz"), 404)["param"] == "lora_name"
    cards = gateway.get("/v1/models").json["data"]
    assert [card["id"] for card in cards] == [MODEL, "ensemble"]
    for card in cards:
        assert gateway.get(f"/v1/models/{card['id']}").json == card
        assert gateway.complete(model=card["id"], prompt="a", max_tokens=1).status == 200


def test_paths_and_methods(gateway: Gateway):
    check(gateway.get("/v1/nothing"), 404)
    check(gateway.get("/v1/models/"), 404)
    check(gateway.get("/v1/chat/completions"), 405)
    check(gateway.get("/tokenize"), 405)
    check(gateway.post("/v1/models", {}), 405)
    assert "pooling" in check(gateway.post("/v1/embeddings", {"input": "a"}))["message"]


def test_unknown_fields_are_named_in_a_header(gateway: Gateway):
    found = gateway.complete(prompt="a", max_tokens=1, surprise=1, **{"b\u00e9\n": 2})
    assert found.status == 200
    assert found.headers["x-slipstream-ignored"].startswith('"surprise", "b')
    assert "x-slipstream-ignored" not in gateway.complete(prompt="a", max_tokens=1).headers


def test_unread_members_of_an_object_are_named_in_the_header(gateway: Gateway):
    options = {"include_usage": True, "include_obfuscation": False}
    form = {"type": "json_object", "strikt": True}
    found = gateway.complete(
        prompt="a", max_tokens=1, stream=True, stream_options=options, response_format=form
    )
    shown = found.headers["x-slipstream-ignored"]
    assert shown == '"stream_options.include_obfuscation", "response_format.strikt"'


def test_a_number_next_to_its_limit_is_shown_in_all_digits(gateway: Gateway):
    for name, value in (("top_p", 1.0000001), ("presence_penalty", 2.0000001)):
        message = check(gateway.complete(prompt="a", **{name: value}))["message"]
        assert message.startswith(f"{name} is {value}, not a ")
    assert check(gateway.complete(prompt="a", top_p=1.1))["message"].startswith("top_p is 1.1, ")


def test_the_header_says_how_many_names_it_leaves_out(gateway: Gateway):
    names = [f"surprise{number}" for number in range(22)]
    found = gateway.complete(prompt="a", max_tokens=1, **dict.fromkeys(names, 1))
    shown, _, more = found.headers["x-slipstream-ignored"].rpartition(", ")
    assert json.loads(f"[{shown}]") == names[:20]
    assert more == "and 2 more"


@settings(max_examples=60)
@given(names=st.lists(st.text(max_size=70), max_size=3, unique=True), is_streaming=st.booleans())
def test_any_name_of_an_unknown_field_fits_into_the_header(
    gateway: Gateway, names: list[str], is_streaming: bool
):
    names = [f"?{name}" for name in ["\x7f\r\n", *names]]
    body = {"prompt": "a", "max_tokens": 1, "stream": is_streaming, **dict.fromkeys(names, 1)}
    found = gateway.complete(**body)
    assert found.status == 200
    shown = json.loads(f"[{found.headers['x-slipstream-ignored']}]")
    assert shown == [name[:64] for name in dict.fromkeys(names)]


def test_a_body_that_is_too_long_is_refused_before_it_is_read(gateway: Gateway):
    with gateway.socket() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 999999999\r\n\r\n"
        )
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {name for body, _ in COMPLETIONS + CHATS for name in body}
    | {"tools", "tool_choice", "stop", "top_k", "min_p", "structured_outputs", "ignore_eos"}
    | {"use_beam_search", "documents", "reasoning_effort", "dry_sequence_breakers", "mirostat"}
    | {"bad_words", "allowed_token_ids", "return_token_ids", "skip_special_tokens"}
)


@settings(max_examples=2000)
@given(
    is_chat=st.booleans(),
    body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
)
def test_no_body_is_an_internal_error(gateway: Gateway, is_chat: bool, body: dict[str, Any]):
    base = {"messages": MESSAGES} if is_chat else {"prompt": "a"}
    body = {**base, "max_tokens": 2, **body}
    if body["max_tokens"] is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = 2  # a null asks for the rest of the context
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    found = gateway.post(path, json.dumps(body).encode())
    if found.status == 200:
        return
    check(found, 404 if body.get("model") and found.status == 404 else 400)


SENT = ROOT / "tests" / "fixtures" / "gateway" / "sent.jsonl"
SERVED = [row for row in map(json.loads, SENT.read_text().splitlines()) if row["status"] == 200]
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and indices that lead to each value within a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield (*above, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*above, key))


@settings(max_examples=2000)
@given(row=st.sampled_from(SERVED), data=st.data())
def test_no_value_within_what_tools_send_is_an_internal_error(
    gateway: Gateway, row: dict[str, Any], data: st.DataObject
):
    body = copy.deepcopy(row["body"])
    place = data.draw(st.sampled_from(list(places(body))))
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(json_values)
    lengths = {name: 2 for name in LENGTHS if isinstance(body.get(name), int)}
    lengths = lengths or {"max_output_tokens" if "input" in body else "max_tokens": 2}
    found = gateway.post(row["path"], json.dumps({**body, **lengths}).encode(), row["headers"])
    assert found.status in (200, 400, 404), found.data
