"""Bodies of `/v1/messages` as chat completions: what each field becomes, and what is refused."""

import json
from typing import Any

import pytest
from fixtures.gateway.answers import OBJECTS, answer_of, stream
from fixtures.gateway.folds import events
from hypothesis import given
from hypothesis import strategies as st
from slipstream_gateway.answer import CallArguments, CallStart, Finish, Reasoning, Text, Usage
from slipstream_gateway.dialects.messages import CountTokens, Messages
from slipstream_gateway.dialects.partial import partial_object
from slipstream_gateway.errors import ApiError

DIALECT = Messages()
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"name": "Read", "description": "Reads a file", "input_schema": SCHEMA}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "Read", "description": "Reads a file", "parameters": SCHEMA},
}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
CLAUDE_CODE = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stop_sequences": ["STOP"],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1b2c;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL},
    ],
    "tools": [
        {**TOOL, "cache_control": EPHEMERAL, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>"},
                {"type": "text", "text": "read a", "cache_control": EPHEMERAL},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "slipstream"},
                {"type": "redacted_thinking", "data": "AAA"},
                {"type": "text", "text": "I read."},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}},
                {"type": "tool_use", "id": "t2", "name": "Read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": "no path",
                },
                {"type": "text", "text": "go on"},
            ],
        },
    ],
}


def chat(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    return DIALECT.to_chat(body | fields)


def test_what_claude_code_sends_is_one_conversation() -> None:
    body = DIALECT.to_chat(CLAUDE_CODE)
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "Read", "arguments": '{"path":"a"}'}},
        {"id": "t2", "type": "function", "function": {"name": "Read", "arguments": "{}"}},
    ]
    parts = [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "read a"}]
    assert body == {
        "model": "m",
        "max_completion_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "stop": ["STOP"],
        "thinking_token_budget": 1024,
        "chat_template_kwargs": {"enable_thinking": True},
        "tools": [CHAT_TOOL],
        "tool_choice": "auto",
        "messages": [
            {"role": "system", "content": "You are Claude Code.\nBe brief."},
            {"role": "user", "content": parts},
            {
                "role": "assistant",
                "content": "I read.",
                "reasoning_content": "hm",
                "tool_calls": calls,
            },
            {
                "role": "tool",
                "tool_call_id": "t1",
                "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
            },
            {"role": "tool", "tool_call_id": "t2", "content": "Error: no path"},
            {"role": "user", "content": "go on"},
        ],
    }


def test_what_claude_code_sends_without_effect_is_named() -> None:
    assert DIALECT.ignored(CLAUDE_CODE) == [
        "metadata",
        "context_management",
        "system[0] (x-anthropic-billing-header)",
        "messages[1].content[1]",
        "tools[1].type=web_search_20250305",
    ]


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"top_k": 5, "top_p": 0.5}, {"top_k": 5, "top_p": 0.5}),
        ({"service_tier": "auto", "mcp_servers": [], "container": None}, {}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            {"tools": [{**TOOL, "type": "custom"}], "tool_choice": {"type": "any"}},
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "tool",
                    "name": "Read",
                    "disable_parallel_tool_use": True,
                },
            },
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "Read"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            {"tools": [CHAT_TOOL], "tool_choice": "none"},
        ),
    ],
)
def test_fields_become_those_of_a_chat(fields: dict[str, Any], made: dict[str, Any]) -> None:
    body = chat(**fields)
    assert body.pop("messages") == [{"role": "user", "content": "hi"}]
    assert body == {
        "model": "m",
        "max_completion_tokens": 5,
        "chat_template_kwargs": {"enable_thinking": False},
        **made,
    }


def test_templates_variables_of_the_request_win() -> None:
    body = chat(
        thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": False, "a": 1}
    )
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "a": 1}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages[0].content[0]",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "Read"}}, "tool_choice.name"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split(".")[0].split("[")[0] in caught.value.message
    shape = json.loads(DIALECT.error(caught.value))
    assert (shape["type"], shape["error"]["type"]) == ("error", "invalid_request_error")


def test_errors_are_in_anthropics_words() -> None:
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
    }
    for status, kind in kinds.items():
        assert json.loads(DIALECT.error(ApiError(status, "x")))["error"]["type"] == kind
    error = ApiError(400, "stop has 9 words, at most 4", "stop")
    assert "stop_sequences has 9 words" in json.loads(DIALECT.error(error))["error"]["message"]
    long = ApiError(400, "9 tokens, at most 5", code="context_length_exceeded")
    message = json.loads(DIALECT.error(long))["error"]["message"]
    assert message == "prompt is too long: 9 tokens, at most 5"


def test_count_tokens_needs_no_max_tokens_and_knows_no_stream() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert CountTokens().to_chat(body)["messages"] == [{"role": "user", "content": "hi"}]
    with pytest.raises(ApiError):
        CountTokens().to_chat({**body, "stream": True})
    assert json.loads(CountTokens().counted(7)) == {"input_tokens": 7}


def test_events_come_in_anthropics_order() -> None:
    made = answer_of(
        Reasoning("hm"),
        Text("Hi"),
        CallStart(0, "call_a", "f"),
        CallArguments(0, '{"a":1}'),
        CallStart(1, "call_b", "g"),
        CallArguments(1, "{}"),
        finish=Finish("tool_calls"),
        usage=Usage(7, 5, 2),
    )
    found = events(stream(DIALECT.writer(CLAUDE_CODE, "m"), made))
    kinds = [each["type"].removeprefix("content_block_") for each in found]
    assert kinds == [
        *("message_start", "ping", "start", "delta", "delta", "stop", "start", "delta", "stop"),
        *("start", "delta", "stop", "start", "delta", "stop", "message_delta", "message_stop"),
    ]
    assert found[0]["message"]["usage"]["input_tokens"] == 7
    assert found[4]["delta"] == {"type": "signature_delta", "signature": "slipstream"}
    assert found[10]["delta"] == {"type": "input_json_delta", "partial_json": '{"a":1}'}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == {
        "input_tokens": 5,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": 5,
    }


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (Finish("stop"), "end_turn", None),
        (Finish("stop", 2), "end_turn", None),
        (Finish("stop", "STOP"), "stop_sequence", "STOP"),
        (Finish("length"), "max_tokens", None),
    ],
)
def test_the_reason_of_the_end(finish: Finish, reason: str, sequence: str | None) -> None:
    answer = answer_of(Text("x"), finish=finish)
    whole = json.loads(DIALECT.writer({}, "m").whole([answer.whole], answer.usage))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_an_aborted_message_is_an_error() -> None:
    answer = answer_of(Text("x"), finish=Finish("abort"))
    assert events(stream(DIALECT.writer({}, "m"), answer))[-1]["type"] == "error"
    with pytest.raises(ApiError, match="aborted"):
        DIALECT.writer({}, "m").whole([answer.whole], answer.usage)


@given(OBJECTS, st.data())
def test_a_cut_object_keeps_its_whole_members(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    assert partial_object(text) == value
    cut = partial_object(text[: data.draw(st.integers(0, len(text) - 1))])
    assert list(cut) == list(value)[: len(cut)]
    for name in list(cut)[:-1]:
        assert cut[name] == value[name]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("[1, 2]", {}),
        ('{"a": [[1], 2, "cu', {"a": [[1], 2]}),
        ('{"a": [{"b": [1, 2]}, {"c": {"d": [3, "cu', {"a": [{"b": [1, 2]}, {"c": {"d": [3]}}]}),
        ('{"a": {"b": []}, "c": [{}, {"d": 1}], "e": tr', {"a": {"b": []}, "c": [{}, {"d": 1}]}),
        ('{"a": "}]\\"{[", "b": "x\\', {"a": '}]"{['}),
    ],
)
def test_brackets_of_a_cut_object_are_closed_in_their_order(
    text: str, value: dict[str, Any]
) -> None:
    assert partial_object(text) == value
