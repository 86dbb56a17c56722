# ruff: noqa: RUF001 - markers have letters that only look like ASCII
"""Recorded answers of each family, at any chunking; hostile and malformed answers."""

import json
import time

import pytest
from fixtures.gateway.recorded import (
    CHOICE,
    RECORDED,
    answers_of,
    by_name,
    names,
    parsed,
    parts,
    special_ids,
    tokens,
    tokens_of,
)
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_gateway.parsing.answers import Answers, format_of
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.parsing.format import AddedTokens
from slipstream_gateway.parsing.formats import CALLS, HARMONY

IDS = [f"{number}-{each.tool_parser}" for number, each in enumerate(RECORDED)]


def read(name, answer, sizes=(10**9,), prompt="", special=None, choice=CHOICE):
    answers = Answers(
        format_of(name, "mistral" if name == "mistral" else "qwen3"), AddedTokens(special or {})
    )
    return parsed(answers, tokens(answer, special or {}), list(sizes), prompt, choice)


def test_each_format_has_an_answer():
    assert set(names()) == {*CALLS, HARMONY}


@pytest.mark.parametrize("recorded", RECORDED, ids=IDS)
@pytest.mark.parametrize("size", quick_of([1, 2, 3, 7, 10**9], [3, 10**9]))
def test_a_recorded_answer_is_read_at_any_chunking(recorded, size):
    given_tokens = tokens(recorded.answer, special_ids(recorded), 4)
    answer = parsed(answers_of(recorded), given_tokens, [size], recorded.prompt)
    assert parts(answer) == (recorded.text, recorded.reasoning, recorded.calls)
    assert len({call.id for call in answer.calls}) == len(answer.calls)


@pytest.mark.parametrize("recorded", RECORDED, ids=IDS)
def test_a_marker_may_be_cut_at_every_place(recorded):
    for cut in range(1, len(recorded.answer)):
        pieces = [(1, recorded.answer[:cut]), (1, recorded.answer[cut:])]
        without = Answers(format_of(recorded.tool_parser, recorded.reasoning_parser), AddedTokens())
        answer = parsed(without, pieces, [1], recorded.prompt)
        assert parts(answer) == (recorded.text, recorded.reasoning, recorded.calls), cut


def test_ids_are_those_of_the_family():
    kimi = by_name("kimi_k2")
    answer = parsed(answers_of(kimi), tokens(kimi.answer, {}), [1], kimi.prompt)
    assert [call.id for call in answer.calls] == ["functions.get_weather:0", "functions.clock:1"]
    mistral = next(each for each in RECORDED if "[CALL_ID]" in each.answer)
    answer = parsed(answers_of(mistral), tokens(mistral.answer, special_ids(mistral)), [1])
    assert len(answer.calls[0].id) == 9
    assert answer.calls[0].id.isalnum()
    assert answer.calls[1].id == "a1b2c3d4e"
    hermes = by_name("hermes")
    answer = parsed(answers_of(hermes), tokens(hermes.answer, {}), [1])
    assert answer.calls[0].id.startswith("call_")


def test_letters_of_a_special_token_are_text():
    mistral = by_name("mistral")
    answers = answers_of(mistral)
    spelled = [(1, each) for each in mistral.answer]
    assert parts(parsed(answers, spelled, [1])) == (mistral.answer, "", ())


def test_a_special_token_may_come_with_its_text():
    llama = by_name("llama3_json")
    special = special_ids(llama)
    given_tokens = [
        (number, text or next(each for each in special if special[each] == number))
        for number, text in tokens(llama.answer, special)
    ]
    assert parts(parsed(answers_of(llama), given_tokens, [2]))[2] == llama.calls


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '  <tool_call>{"na'),
        ("hermes", "a < b <tool_cal"),
        ("qwen3_coder", "see <tool_call>\nx</tool_call> and </function>"),
        ("qwen3_coder", "<function=a b>"),
        ("glm45", "<tool_call>no name here</tool_call>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁call▁end｜>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>clock"),
        ("kimi_k2", "<|tool_call_begin|>clock<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS]clock"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("llama3_json", '{"name": "nobody", "parameters": {}}'),
        ("llama3_json", '{"answer": {"name": "clock"}}'),
        ("llama3_json", '{"name": "clock"}'),
        ("llama3_json", 'I say {"name": "clock", "parameters": {}}'),
        ("pythonic", "[1] a list"),
        ("pythonic", "[nobody(a=1)]"),
        ("pythonic", "[clock(1)]"),
        ("pythonic", "see [clock()]"),
        ("openai", "<|channel|>final"),
        ("openai", "no header"),
    ],
)
def test_what_is_no_call_is_text_as_written(name, answer):
    for size in (1, 2, 5, 10**9):
        got = (
            read(name, answer, [size])
            if name != "openai"
            else parsed(
                Answers(format_of("openai", None), AddedTokens()), tokens(answer, {}), [size]
            )
        )
        assert parts(got) == (answer, "", ())


@pytest.mark.parametrize(
    ("name", "answer", "text", "calls"),
    [
        # A name that is no tool's is a call where a marker says so.
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "", ["{}"]),
        # No arguments at all; arguments before the name; as a text; null.
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", ["{}"]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ['{"a": 1}']),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            ['{"a": 1}'],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", ["{}"]),
        # A marker in a text is text; a line break in a text is escaped.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\n"}}</tool_call>',
            "",
            ['{"a": "</tool_call>\\u000a"}'],
        ),
        # What follows a call and does not belong to it is text.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}}</tool_call>\nDone.',
            "}\nDone.",
            ["{}"],
        ),
        # A cut call stays cut.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", ['{"a": "b']),
        ("qwen3_coder", "<function=f><parameter=a>b", "", ['{"a": "b']),
        # Tags without their section; several values of one key.
        ("qwen3_coder", "<function=f></function></tool_call>!", "!", ["{}"]),
        # Types come from the schema; without one, JSON is what it looks like.
        (
            "qwen3_coder",
            "<function=get_weather><parameter=city>5</parameter><parameter=days>5</parameter>"
            "<parameter=units>{'a': None}</parameter><parameter=other>5</parameter>"
            "<parameter=more>x y</parameter></function>",
            "",
            ['{"city": "5", "days": 5, "units": {"a": null}, "other": 5, "more": "x y"}'],
        ),
        # Only one newline at either end goes.
        (
            "qwen3_coder",
            "<function=get_weather><parameter=city>\n\n a\n\n</parameter></function>",
            "",
            ['{"city": "\\n a\\n"}'],
        ),
        ("pythonic", "[clock(), nobody()]", ", nobody()]", ["{}"]),
        (
            "pythonic",
            "[clock(a=[1, (2,)], b={'x': -1.5}, c='\\'', d=True, e=x.y, f=\"\\u00e9\")]",
            "",
            ['{"a": [1, [2]], "b": {"x": -1.5}, "c": "\'", "d": true, "e": "x.y", "f": "\\u00e9"}'],
        ),
        ("glm45", "<tool_call>clock</tool_call>", "", ["{}"]),
    ],
)
def test_calls_that_are_written_oddly(name, answer, text, calls):
    for size in (1, 3, 10**9):
        got = read(name, answer, [size])
        assert got.text == text
        assert [call.arguments for call in got.calls] == calls


def test_calls_in_reasoning_are_calls_where_the_family_writes_them_there():
    call = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    got = read("qwen3_coder", f"a\n{call}\nb</think>c", prompt="<think>\n")
    assert parts(got) == ("c", "a\nb", (("clock", "{}"),))
    inner = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    got = read("hermes", f"a {inner} b</think>c", prompt="<think>\n")
    assert parts(got) == ("c", f"a {inner} b", ())


def test_reasoning_starts_where_the_prompt_says_so():
    assert parts(read("hermes", "a</think>b", prompt="x<think>\n")) == ("b", "a", ())
    assert parts(read("hermes", "a</think>b", prompt="x<think>\n\n</think>\n\n")) == (
        "a</think>b",
        "",
        (),
    )
    assert parts(read("hermes", "What is <think>?", prompt="What is <think>?")) == (
        "What is <think>?",
        "",
        (),
    )


def test_without_tools_calls_are_text():
    hermes = by_name("hermes")
    got = read("hermes", hermes.answer, choice=read_choice(None))
    assert got.calls == []
    assert got.text.startswith("Let me look.\n<tool_call>")
    got = read(
        "hermes",
        hermes.answer,
        choice=read_choice([{"type": "function", "function": {"name": "clock"}}], "none"),
    )
    assert got.calls == []


PIECES = [
    *sorted({marker for each in CALLS.values() for marker in each.markers()}),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|end|>"),
    *("<|start|>", "<|call|>", "analysis", "commentary to=functions.clock ", "final"),
    *("<function=clock", "clock", "get_weather", "functions.clock:0", "(", ")", "city=", '"', "'"),
    *('{"name": "clock", "arguments": ', '{"name": "clock", "parameters": ', '{"a": "b\\"', "}"),
    *("{", "[", "]", ",", ";", ":", "\\", "\n", " ", "\n\n", "```json\n", "```", "1", "true", "é"),
    *("city", "> ", "=", "😀", "[clock(", "\x00", "e\u0301"),
]


@pytest.mark.parametrize("name", [*CALLS, HARMONY])
@settings(max_examples=150)
@given(
    pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=25),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    is_special=st.booleans(),
    prompt=st.sampled_from(["", "<think>\n"]),
)
def test_the_sum_is_the_same_at_any_chunking(name, pieces, sizes, is_special, prompt):
    recorded = by_name(name)
    special = special_ids(recorded) if is_special else {}
    form = format_of(name, None if name == HARMONY else "qwen3")
    answers = Answers(form, AddedTokens(special))
    made = tokens("".join(pieces), special, 1)
    whole = parsed(answers, made, [10**9], prompt)
    assert parts(parsed(answers, made, sizes, prompt)) == parts(whole)
    assert parts(parsed(answers, made, [1], prompt)) == parts(whole)


@pytest.mark.parametrize("name", [*CALLS, HARMONY])
@settings(max_examples=60)
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_text_without_markers_is_text_as_written(name, text):
    if any(each in text for each in "<[{"):
        return
    answers = Answers(format_of(name, None), AddedTokens())
    assert parts(parsed(answers, [(1, text)], [1])) == (text, "", ())


def timed(name, answer, size=4):
    start = time.perf_counter()
    got = (
        read(name, answer, [1])
        if size == 1
        else parsed(Answers(format_of(name, None), AddedTokens()), tokens_of(answer, size), [1])
    )
    return got, time.perf_counter() - start


HUGE = 1 << 20
BIG_CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>',
    "qwen3_coder": "<function=get_weather><parameter=city>%s</parameter></function>",
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>",
    "llama3_json": '{"name": "clock", "parameters": {"a": "%s"}}',
    "pythonic": "[clock(a='%s')]",
    "mistral": '[TOOL_CALLS]f{"a": "%s"}',
    "kimi_k2": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "%s"}',
}


@pytest.mark.rest
@pytest.mark.parametrize("name", BIG_CALLS)
def test_a_mebibyte_of_arguments_takes_linear_time(name):
    quarter, one = (
        timed(name, BIG_CALLS[name] % ("x<" * (size // 2))) for size in (HUGE // 4, HUGE)
    )
    assert json.loads(one[0].calls[0].arguments) in (
        {"a": "x<" * (HUGE // 2)},
        {"city": "x<" * (HUGE // 2)},
    )
    assert one[1] < 8 * quarter[1] + 1


QUICK = ("hermes", "qwen3_coder", "pythonic", "openai")


@pytest.mark.parametrize("name", quick_of([*CALLS, HARMONY], QUICK))
@pytest.mark.parametrize("piece", ["{", "[", "(", "<", '{"a":', "[f(", "\n", '"', "\\"])
def test_hundred_thousand_brackets_take_no_stack(name, piece):
    opening = {"hermes": '<tool_call>{"name": "f", "arguments": ', "pythonic": "[clock(a="}
    answer = opening.get(name, "") + piece * 100_000
    recorded = by_name(name)
    got = parsed(answers_of(recorded), tokens_of(answer, 1000), [1])
    joined = got.text + "".join(call.arguments for call in got.calls)
    written = {"\n": ("\n", "\\n")}.get(piece, (piece[0],))
    assert sum(map(joined.count, written)) >= 99_999 or piece in ("\\", '"')
