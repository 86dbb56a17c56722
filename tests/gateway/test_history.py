"""What chat templates get of the messages of a request."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_gateway.errors import ApiError
from slipstream_gateway.history import prepare_messages
from slipstream_preprocessing.chat import ChatTemplate

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def prepared(message):
    (result,) = prepare_messages([message])
    return result


def test_arguments_become_an_object_once():
    calls = prepared(CALLING)["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"a": "é"}
    assert calls[0]["id"] == "call_1"
    assert CALL["function"]["arguments"] == '{"a": "é"}', "the request is as it was"


@pytest.mark.parametrize(
    ("given_arguments", "expected"),
    [
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("{", "{"),
    ],
)
def test_arguments_that_are_no_json_object_stay(given_arguments, expected):
    call = {"function": {"name": "f", "arguments": given_arguments}}
    message = prepared({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a | tojson", '{"a": "é"}'),
        ("'<' + a + '>'", '<{"a": "é"}>'),
        ("a ~ '!'", '{"a": "é"}!'),
        ("a", '{"a": "é"}'),
        ("a is mapping", "True"),
        ("a is string", "False"),
        ("a.items() | list", "[('a', 'é')]"),
        ("a.a", "é"),
    ],
)
def test_every_way_that_templates_write_arguments_works(expression, expected):
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ " + expression + " }}"
    template = ChatTemplate({"default": source}, {})
    assert template.render(prepare_messages([CALLING])) == expected


def test_roles_and_contents():
    assert prepared({"role": "developer", "content": "x"}) == {"role": "system", "content": "x"}
    assert prepared({"role": "function", "name": "f", "content": "x"})["role"] == "tool"
    assert prepared(
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}
    ) == {
        "role": "tool",
        "tool_call_id": "c",
        "content": "x",
    }
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert prepared({"role": "assistant", "content": parts})["content"] == "a\nb"
    assert prepared({"role": "assistant", "content": None})["content"] == ""
    assert prepared({"role": "assistant", "content": None, "refusal": "no"})["content"] == "no"
    assert "tool_calls" not in prepared({"role": "assistant", "content": "x", "tool_calls": []})
    assert prepared({"role": "assistant", "content": "x", "reasoning": "y"})["reasoning"] == "y"
    old = prepared({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}})
    assert old["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert "function_call" not in old


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (None, "messages", "None, not a list"),
        ([], "messages", "messages is empty"),
        ([5], "messages[0]", "5, not an object"),
        ([{"role": "robot"}], "messages[0].role", "'robot', not one of system, developer"),
        ([{"content": "x"}], "messages[0].role", "None, not one of"),
        ([{"role": "user", "content": 5}], "messages[0].content", "5, neither"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
            "'image_url', but only text is served",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[0].content[0].type",
            "'input_audio', but only text is served",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "None"),
        ([{"role": "assistant", "audio": {"id": "x"}}], "messages[0].audio", "only text is served"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls", "5, not a list"),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
            "messages[0].tool_calls[0].type",
            "'custom', only function",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
            "messages[0].tool_calls[0].function.name",
            "1, not a name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "1, neither",
        ),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "5, not a text"),
    ],
)
def test_what_is_not_served_is_refused_by_name(messages, param, words):
    with pytest.raises(ApiError) as caught:
        prepare_messages(messages)
    assert caught.value.param == param
    assert words in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("role", "content", "tool_calls", "refusal", "function_call", "name", "type", "function")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(FIELDS), st.one_of(JSON, st.sampled_from(["user", "assistant"]))
        ),
        max_size=3,
    )
)
def test_any_json_is_prepared_or_refused(messages):
    try:
        result = prepare_messages(messages)
    except ApiError:
        return
    assert len(result) == len(messages)
    assert all(isinstance(message["content"], str) for message in result)
    json.dumps(result)
