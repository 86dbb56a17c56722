"""Responses and messages of a real gateway: streamed and whole, counted, refused, named."""

import json

import pytest
from fixtures.gateway.folds import events, fold_message, fold_response

FIXED = {"model": "pystdlib-5m", "temperature": 0}
INPUT = [{"role": "user", "content": "import os"}]
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]


def test_a_streamed_response_is_the_whole_one(gateway):
    body = {**FIXED, "input": INPUT, "max_output_tokens": 12, "top_logprobs": 1}
    whole = gateway.post("/v1/responses", body).json
    streamed = gateway.post("/v1/responses", {**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    folded = fold_response(events(streamed.data))
    assert (folded["status"], folded["usage"]["output_tokens"]) == ("incomplete", 12)
    for one, other in zip(folded["output"], whole["output"], strict=True):
        assert {**one, "id": ""} == {**other, "id": ""}
    (part,) = folded["output"][0]["content"]
    assert part["text"]
    assert len(part["logprobs"]) == 12
    assert "[DONE]" not in streamed.data.decode()


def test_a_streamed_message_is_the_whole_one(gateway):
    body = {**FIXED, "messages": INPUT, "max_tokens": 12, "system": "x"}
    whole = gateway.post("/v1/messages?beta=true", body).json
    folded = fold_message(events(gateway.post("/v1/messages", {**body, "stream": True}).data))
    assert folded["content"] == whole["content"]
    assert folded["stop_reason"] == whole["stop_reason"] == "max_tokens"
    total = [
        each["usage"]["input_tokens"] + each["usage"]["cache_read_input_tokens"]
        for each in (folded, whole)
    ]
    del body["max_tokens"], body["temperature"]
    counted = gateway.post("/v1/messages/count_tokens", body).json
    assert total == [counted["input_tokens"]] * 2


def test_a_stop_sequence_is_returned(gateway):
    body = {**FIXED, "messages": INPUT, "max_tokens": 40}
    text = gateway.post("/v1/messages", body).json["content"][0]["text"]
    word = text[len(text) // 2 :][:3]
    cut = gateway.post("/v1/messages", {**body, "stop_sequences": [word]}).json
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", word)
    assert word not in cut["content"][0]["text"]


def test_a_schema_holds_in_both(gateway):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "schema": schema}
    text = {"format": {**form, "name": "n"}}
    body = {**FIXED, "input": INPUT, "text": text, "max_output_tokens": 60}
    response = gateway.post("/v1/responses", body).json
    assert json.loads(response["output"][0]["content"][0]["text"])["a"] in (True, False)
    body = {**FIXED, "messages": INPUT, "output_config": {"format": form}, "max_tokens": 60}
    message = gateway.post("/v1/messages", body).json
    assert json.loads(message["content"][0]["text"])["a"] in (True, False)


def test_what_has_no_effect_is_in_a_header(gateway):
    body = {**FIXED, "input": "x", "store": False, "max_output_tokens": 1}
    response = gateway.post("/v1/responses", {**body, "tools": [{"type": "web_search"}]})
    assert response.headers["x-slipstream-ignored"] == '"store", "tools[0].type=web_search"'
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {**FIXED, "messages": INPUT, "max_tokens": 1, "thinking": thinking}
    message = gateway.post("/v1/messages", body)
    assert message.status == 200, message.data
    assert message.headers["x-slipstream-ignored"] == '"thinking_token_budget"'


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("responses", {"input": IMAGE}, 400, "input[0].content[0].type"),
        ("responses", {"input": "x", "max_output_tokens": -1}, 400, "max_output_tokens is -1"),
        ("responses", {"input": "x", "previous_response_id": "r"}, 400, "previous_response_id"),
        ("responses", {"input": "x", "model": "none-such"}, 404, "none-such"),
        ("responses", {"input": "x " * 9999}, 400, "the context"),
        ("messages", {"messages": INPUT}, 400, "max_tokens"),
        ("messages", {"messages": INPUT, "max_tokens": 1, "top_p": 2}, 400, "top_p is 2"),
        ("messages", {"messages": INPUT, "max_tokens": 1, "model": "none-such"}, 404, "none-such"),
        (
            "messages",
            {"messages": [{"role": "user", "content": "x " * 9999}], "max_tokens": 1},
            400,
            "prompt is too long",
        ),
        ("messages/count_tokens", {"messages": []}, 400, "messages"),
    ],
)
def test_refusals_have_the_shape_of_their_endpoint(gateway, path, body, status, says):
    fixed = {"model": "pystdlib-5m"}
    answer = gateway.post(f"/v1/{path}", fixed | body)
    assert answer.status == status
    error = answer.error
    assert says in error["message"]
    if path == "responses":
        assert set(error) == {"message", "type", "param", "code"}
        if "context" in says:
            assert error["code"] == "context_length_exceeded"
    else:
        assert answer.json["type"] == "error"
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert error["type"] == kind
    gateway.wait_idle()
