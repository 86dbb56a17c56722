"""Calls of tools by grammar, on a real engine: the small model has never seen one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.gateway.served import Gateway, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}
COMMON = {"tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 200, "seed": 1}


@pytest.fixture(scope="module")
def caller(gateway_repository: Path, tmp_path_factory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("caller") / "log"
    with serving(gateway_repository, log, "--tool-call-parser", "hermes") as gateway:
        yield gateway


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_call_that_must_come_comes_and_streams(caller: Gateway, choice: object, reason: str):
    found = caller.chat(tool_choice=choice, **COMMON)
    assert found.status == 200, found.data
    [answer] = found.json["choices"]
    assert answer["finish_reason"] == reason
    [call] = answer["message"]["tool_calls"]
    assert answer["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"a"}
    assert 0 <= arguments["a"] <= 9

    chunks = caller.chat(tool_choice=choice, stream=True, **COMMON).chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [part for delta in deltas for part in delta.get("tool_calls", ())]
    first, *others = calls
    assert first["function"] == {"name": "add", "arguments": ""}
    assert first["type"] == "function"
    assert first["id"].startswith("call")
    assert all(part.keys() == {"index", "function"} for part in others)
    joined = "".join(part["function"]["arguments"] for part in calls)
    assert joined == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_tools_need_a_known_form_of_calls(gateway: Gateway):
    found = gateway.chat(tools=[TOOL], max_tokens=1)
    assert (found.status, found.error["param"]) == (400, "tools")
    assert gateway.chat(tools=[TOOL], tool_choice="none", max_tokens=1).status == 200


def test_a_grammar_of_calls_and_another_guide_are_one_too_many(caller: Gateway):
    form = {"type": "json_object"}
    found = caller.chat(tool_choice="required", response_format=form, **COMMON)
    assert found.status == 400
    assert "response_format" in found.error["message"]


def test_other_dialects_have_the_same_call(caller: Gateway):
    schema = TOOL["function"]["parameters"]
    anthropic = caller.post(
        "/v1/messages",
        {
            "model": "ensemble",
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "import os"}],
            "tools": [{"name": "add", "input_schema": schema}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    )
    assert anthropic.status == 200, anthropic.data
    [block] = [each for each in anthropic.json["content"] if each["type"] == "tool_use"]
    assert (block["name"], block["input"].keys()) == ("add", {"a"})
    responses = caller.post(
        "/v1/responses",
        {
            "model": "ensemble",
            "input": "import os",
            "tools": [{"type": "function", "name": "add", "parameters": schema}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 200,
        },
    )
    assert responses.status == 200, responses.data
    items = [each for each in responses.json["output"] if each["type"] == "function_call"]
    assert items[0]["name"] == "add"
