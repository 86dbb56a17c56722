"""Bodies of `/v1/responses` as chat completions: what each field becomes, and what is refused."""

import json
from typing import Any

import pytest
from fixtures.gateway.answers import answer_of, stream
from fixtures.gateway.folds import events
from slipstream_gateway.answer import CallArguments, CallStart, Finish, Reasoning, Text, Usage
from slipstream_gateway.dialects.responses import Responses
from slipstream_gateway.errors import ApiError

DIALECT = Responses()
FUNCTION = {
    "type": "function",
    "name": "shell",
    "description": "Run a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CHAT_TOOL = {"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "type"}}
CODEX = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {
            "type": "reasoning",
            "id": "rs_2",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "use ls"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "shell",
            "arguments": '{"command":"ls"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        {"type": "message", "role": "user", "content": "and?"},
    ],
    "tools": [FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "key",
    "client_metadata": {"x-codex-installation-id": "1"},
}


def chat(**fields: Any) -> dict[str, Any]:
    return DIALECT.to_chat({"model": "m", "input": "hi", **fields})


def test_what_codex_sends_is_one_conversation() -> None:
    body = DIALECT.to_chat(CODEX)
    call = {"name": "shell", "arguments": '{"command":"ls"}'}
    assert body == {
        "model": "m",
        "stream": True,
        "reasoning_effort": "medium",
        "tools": [CHAT_TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "messages": [
            {"role": "system", "content": "You are a coding agent.\n\n<permissions>"},
            {"role": "user", "content": "list"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "use ls",
                "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
            {"role": "user", "content": "and?"},
        ],
    }


def test_what_codex_sends_without_effect_is_named() -> None:
    assert DIALECT.ignored(CODEX) == [
        "store",
        "prompt_cache_key",
        "client_metadata",
        "input[2]",
        "include[reasoning.encrypted_content]",
        "reasoning.summary",
        "tools[1].type=web_search",
        "tools[2].type=custom",
    ]


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"max_output_tokens": 9}, {"max_completion_tokens": 9}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        (
            {"include": ["message.output_text.logprobs"]},
            {"logprobs": True, "top_logprobs": 0},
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"a": 1}},
                }
            },
        ),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, {"temperature": 0, "top_p": 0.5, "seed": 3}),
        ({"truncation": "disabled", "background": False, "store": True, "metadata": {}}, {}),
        ({"tools": [{"type": "web_search"}]}, {}),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "shell"}},
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "shell"}},
            },
        ),
        (
            {
                "tools": [{"type": "function", "name": "other", "parameters": None}, FUNCTION],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "shell"}, {"type": "mcp"}],
                },
            },
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
    ],
)
def test_fields_become_those_of_a_chat(fields: dict[str, Any], made: dict[str, Any]) -> None:
    body = chat(**fields)
    assert body.pop("messages") == [{"role": "user", "content": "hi"}]
    assert body == {"model": "m", **made}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
            "input[0].content[0].text",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_file", "file_id": "f"}],
                    }
                ]
            },
            "input[0].output[0].type",
        ),
        ({"include": ["everything"]}, "include[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "f", "paramters": {}}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "p"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"n": 2}, "n"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split(".")[0].split("[")[0] in caught.value.message
    shape = json.loads(DIALECT.error(caught.value))["error"]
    assert (shape["type"], shape["param"]) == ("invalid_request_error", param)


def test_errors_of_the_chat_completion_name_the_field_of_the_request() -> None:
    error = ApiError(400, "max_completion_tokens is 0, at least 1", "max_completion_tokens")
    assert json.loads(DIALECT.error(error))["error"] == {
        "message": "max_output_tokens is 0, at least 1",
        "type": "invalid_request_error",
        "param": "max_output_tokens",
        "code": None,
    }
    full = json.loads(DIALECT.error(ApiError(429, "full", code="rate_limit_exceeded")))["error"]
    assert full["type"] == "rate_limit_error"


def test_events_come_in_openais_order() -> None:
    made = answer_of(
        Reasoning("hm"),
        Text("Hel"),
        Text("lo"),
        CallStart(0, "call_a", "f"),
        CallArguments(0, '{"a"'),
        CallArguments(0, ":1}"),
        CallStart(1, "call_b", "g"),
        CallArguments(1, "{}"),
        finish=Finish("tool_calls"),
        usage=Usage(7, 5, 2, 1),
    )
    found = events(stream(DIALECT.writer(CODEX, "m"), made))
    assert [each["type"].removeprefix("response.") for each in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    response = found[-1]["response"]
    assert response["output"][2] | {"id": ""} == {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_a",
        "name": "f",
        "arguments": '{"a":1}',
    }
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 12,
    }
    assert response["tools"] == [FUNCTION]
    assert (response["store"], response["reasoning"]["effort"]) == (False, "medium")
    assert len({item["id"] for item in response["output"]}) == 4


def test_a_cut_answer_is_incomplete_and_an_aborted_one_failed() -> None:
    writer = DIALECT.writer({"input": "hi", "max_output_tokens": 1}, "m")
    last = events(stream(writer, answer_of(Text("a"), finish=Finish("length"))))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    writer = DIALECT.writer({"input": "hi"}, "m")
    last = events(stream(writer, answer_of(Text("a"), finish=Finish("abort"))))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
