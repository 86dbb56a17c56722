"""A checkpoint's own `response_template`: what transformers reads of a text, as it comes."""

import json

import pytest
from fixtures.gateway.recorded import TOOLS, parsed, parts, tokens_of
from fixtures.gateway.templates import JSON_CALLS, SPECS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.answers import Answers, template_format
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.parsing.contents import CONTENTS
from slipstream_gateway.parsing.detect import choose
from slipstream_gateway.parsing.format import AddedTokens
from slipstream_gateway.parsing.values import dump

response_parser = pytest.importorskip("transformers.utils.chat_parsing.response_parser")

CASES = [
    (
        "json",
        "<|im_start|>assistant\n<think>\n",
        'hm\n</think>\n\nLook:\n<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n'
        '</tool_call>\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        ("Look:", "hm", (("clock", '{"a": 1}'), ("clock", "{}"))),
    ),
    (
        "tags",
        "<|im_start|>assistant\n",
        "<think>hm</think> Look:\n<tool_call>\n<function=get_weather>\n<parameter=city>\n5\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        ("Look:", "hm", (("get_weather", '{"city": "5", "days": 3}'),)),
    ),
    (
        "marked",
        "<|turn>model\n",
        '<|channel>thought\nhm<channel|><|tool_call>call:get_weather{city:<|"|>O"slo<|"|>,'
        "days:3}<tool_call|>",
        ("", "hm", (("get_weather", '{"city": "O\\"slo", "days": 3}'),)),
    ),
    (
        "listed",
        "<aa>",
        ' x [CALLS][{"name": "f", "args": {}}, {"name": "g", "args": {"a": [1]}}]',
        (" x ", "", (("f", "{}"), ("g", '{"a": [1]}'))),
    ),
]


def answers_of(name, special=None):
    return Answers(template_format(SPECS[name]), AddedTokens(special or {}))


@pytest.mark.parametrize(("name", "prompt", "answer", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_answers_are_read_at_any_chunking(name, prompt, answer, expected, size):
    got = parsed(answers_of(name), tokens_of(answer, size), [1], prompt)
    assert parts(got) == expected


def test_special_tokens_that_the_template_names_are_read():
    special = {"<|tool_call>": 5, "<tool_call|>": 6, "<bos>": 7}
    made = [(5, ""), (1, "call:clock{}"), (7, ""), (6, "")]
    got = parsed(answers_of("marked", special), made, [1], "<|turn>model\n")
    assert parts(got) == ("", "", (("clock", "{}"),))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("json", "a\n<tool_call>no JSON</tool_call>b"),
        ("json", 'a <tool_call>{"arguments": {}}</tool_call>'),
        ("json", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("json", "a <tool_call>{"),
        ("marked", "<|tool_call>call:f{a:<tool_call|>"),
        ("listed", "[CALLS]{}"),
    ],
)
def test_what_is_no_call_is_text_as_written(name, answer):
    for size in (1, 10**9):
        got = parsed(answers_of(name), tokens_of(answer, size), [1])
        assert parts(got) == (answer, "", ())


NUMBERS = ["1e400", "-1.5E+999", "1e-400", "0.10000000000000000555", "1.0", "1E5", "7" * 5000]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_beyond_a_double_stay_as_written(number):
    arguments = f'{{"a": {number}, "b": [{number}, "é"]}}'
    answer = f'<tool_call>{{"name": "clock", "arguments": {arguments}}}</tool_call>'
    got = parsed(answers_of("json"), tokens_of(answer, 10**9), [1])
    assert parts(got) == ("", "", (("clock", arguments),))
    listed = f'[CALLS][{{"name": "f", "args": {arguments}}}]'
    assert parts(parsed(answers_of("listed"), tokens_of(listed, 7), [1])) == (
        *("", ""),
        (("f", arguments),),
    )


@pytest.mark.parametrize("text", ["inf", "nan", "-Infinity", "1e400x"])
def test_words_are_no_numbers(text):
    with pytest.raises(ValueError, match=r"number|convert|Expecting"):
        CONTENTS["float"](text, {})


def test_a_long_number_is_one_of_contents():
    assert dump([CONTENTS["float"]("1e400", {}), CONTENTS["float"]("1.5", {})]) == "[1e400, 1.5]"


def test_without_tools_calls_are_text():
    _, prompt, answer, _ = CASES[0]
    got = parsed(answers_of("json"), tokens_of(answer, 4), [1], prompt, read_choice(None))
    assert got.calls == []
    assert '<tool_call>\n{"name": "clock"' in got.text


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "\n", " ", "x", "é"),
    *('{"name": "clock", "arguments": {}}', "<function=clock>", "</function>", "<eos>", "<turn|>"),
    *("<parameter=city>", "</parameter>", "<|channel>thought\n", "<channel|>", "5", "<tool_call|>"),
    *("<|tool_call>call:clock", "{}", '<|"|>', "[CALLS]", "[/CALLS]", "[]", "<", "</", "<|"),
]


def is_call(value: object) -> bool:
    """Tell whether what transformers read as a function names one and has arguments."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments"), dict)
    )


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=300)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=14),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    thinks=st.booleans(),
)
@example(pieces=["<tool_call>", "{}"], sizes=[1], thinks=False)
@example(pieces=["[CALLS]", "[]", "[/CALLS]", "x"], sizes=[1], thinks=False)
def test_it_reads_what_transformers_reads(name, pieces, sizes, thinks):
    anchor = {"json": "<|im_start|>assistant\n", "tags": "<|im_start|>assistant\n"}
    prompt = {"marked": "<|turn>model\n", "listed": "<a>"}.get(name, anchor.get(name))
    prompt += "<think>\n" if thinks and name in anchor else ""
    text = "".join(pieces)
    whole = parsed(answers_of(name), [(1, text)], [1], prompt)
    assert parts(parsed(answers_of(name), tokens_of(text, 1), sizes, prompt)) == parts(whole)
    own = response_parser.ResponseParser(SPECS[name], prompt, tools=TOOLS)
    try:
        events = own.feed(text)
        events += own.finalize()[1]
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # it raises where ours is text
    values = [(each["field"], each["value"]) for each in events if each["type"] == "region_close"]
    calls = []
    for _, value in (each for each in values if each[0] == "tool_calls"):
        listed = value if isinstance(value, list) else [value]
        functions = [each["function"] for each in listed]
        if not all(map(is_call, functions)):
            return  # ours is text
        calls += [(each["name"], each["arguments"]) for each in functions]
    assert whole.text == "".join(value for field, value in values if field == "content")
    thoughts = "".join(
        value for field, value in values if field in ("thinking", "reasoning_content")
    )
    assert whole.reasoning == thoughts
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version is 2"),
        ({"other": 1}, "other is not known"),
        ({"fields": {}}, "fields is"),
        ({"fields": {"audio": {}}}, "fields.audio is not one of"),
        ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "given beside"),
        ({"fields": {"content": {"open_pattern": "("}}}, "open_pattern is"),
        ({"fields": {"content": {}, "thinking": {}}}, "several fields without an opening"),
        ({"fields": {"content": {"content": "json"}}}, "not served there"),
        ({"fields": {"tool_calls": {"content": "yaml"}}}, "not served there"),
        ({"start_anchor": []}, "start_anchor is"),
    ],
)
def test_templates_that_are_not_served_are_refused_by_name(change, words):
    with pytest.raises(ApiError, match=words):
        template_format({**JSON_CALLS, **change})


def test_it_is_read_where_no_format_is_known_or_by_its_name():
    none = AddedTokens()
    assert choose("{{ x }}", none, response_template=JSON_CALLS).format.name == "hf"
    assert choose("<tool_call>", none, response_template=JSON_CALLS).format.name == "hermes"
    assert choose("<tool_call>", none, "hf", response_template=JSON_CALLS).format.name == "hf"
    assert choose("{{ x }}", none, "none", "none", JSON_CALLS).format.name == "none"
    with pytest.raises(ApiError, match="no response_template"):
        choose("<tool_call>", none, "hf")
