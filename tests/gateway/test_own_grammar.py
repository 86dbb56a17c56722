"""Calls in a checkpoint's own form are guided: what the grammar accepts, its parser reads."""

import json
import random

import jsonschema
import pytest
from fixtures.gateway.recorded import parsed
from fixtures.gateway.templates import JSON_CALLS, MARKED_CALLS, SPECS, TAG_CALLS
from fixtures.gateway.walks import vocabulary
from fixtures.tiers import quick_of
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.answers import Answers, template_format
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.parsing.format import AddedTokens

PLAIN = {
    "query": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 50},
    "ratio": {"type": "number"},
    "order": {"enum": ["up", "down", "5", ""]},
    "either": {"type": ["string", "null"]},
    "flag": {"type": "boolean"},
}
NESTED = {
    "deep": {"$ref": "#/$defs/node"},
    "mixed": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}]},
    "free": {},
}
NODE = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
    "required": ["tags"],
    "additionalProperties": False,
}


def schemas(name):
    properties = PLAIN if name == "tags" else PLAIN | NESTED
    if name == "tags":
        properties = properties | {"short": {"type": "string", "minLength": 1, "maxLength": 4}}
    search = {
        "type": "object",
        "properties": properties,
        "required": ["query", "flag"],
        "additionalProperties": False,
        "$defs": {"node": NODE},
    }
    return {"search": search, "now": {"type": "object", "properties": {}}, "any": {}}


def choice_of(name, mode, strict=True, is_parallel=None):
    tools = [
        {"type": "function", "function": {"name": key, "parameters": each, "strict": strict}}
        for key, each in schemas(name).items()
    ]
    return read_choice(tools, mode, is_parallel)


SPECIAL = {
    "json": ("<tool_call>", "</tool_call>"),
    "marked": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"),
}
NAMED = {"type": "function", "function": {"name": "search"}}


def walked(name, choice, seed, with_tokens=True, prompt=""):
    vocab = vocabulary(SPECIAL.get(name, ()) if with_tokens else ())
    answers = Answers(template_format(SPECS[name]), vocab.added)
    taken = vocab.walk(answers.guide(choice, prompt), seed, HINTS)
    if taken is None:
        return None, ""
    made = vocab.tokens(taken)
    if with_tokens:  # a special token is read by its id; other texts are as they are
        names = {token_id: text for text, token_id in vocab.added.special.items()}
        written = "".join(text or names.get(token_id, "") for token_id, text in made)
    else:
        written = "".join(text for _, text in made)
    return parsed(answers, made, [random.Random(seed).randint(1, 9)], prompt, choice), written


HINTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>"),
    *("<parameter=", "\n</parameter>", "</parameter>", "[CALLS]", "[/CALLS]", "<|tool_call>"),
    *("<tool_call|>", '<|"|>', "</function>\n</tool_call>", "<|channel>thought\n", "<channel|>"),
    *('"', "}", "]", "{", ",", "\n", "1", "\x01", " "),
]
SEEDS = quick_of([range(2), range(2, 80)], [range(2)])


def check_calls(name, answer, where):
    for call in answer.calls:
        assert call.name in schemas(name), where
        jsonschema.validate(json.loads(call.arguments), schemas(name)[call.name])


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_a_required_call_comes_and_follows_its_schema(name, with_tokens, seeds):
    ended = 0
    for seed in seeds:
        answer, written = walked(name, choice_of(name, "required"), seed, with_tokens)
        if answer is not None:
            ended += 1
            assert answer.calls, written
            assert answer.text == "", written
            check_calls(name, answer, written)
    assert ended or len(seeds) < 9


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_a_named_call_or_one_that_may_have_no_other_is_alone(name, seeds):
    for seed in seeds:
        answer, written = walked(name, choice_of(name, NAMED), seed)
        if answer is not None:
            assert [call.name for call in answer.calls] == ["search"], written
            check_calls(name, answer, written)
        answer, written = walked(name, choice_of(name, "auto", None, False), seed)
        if answer is not None:
            assert len(answer.calls) <= 1, written


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_strict_calls_in_free_text_follow_their_schemas(name, seeds):
    for seed in seeds:
        answer, written = walked(name, choice_of(name, "auto"), seed, seed % 2 == 0)
        if answer is not None:
            check_calls(name, answer, written)


CALLS = {
    "json": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'.replace("\n", ""),
    "tags": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "marked": "<|tool_call>call:now{}<tool_call|>",
    "listed": '[CALLS][{"name": "now", "args": {}}][/CALLS]',
}


@pytest.mark.parametrize("name", SPECS)
def test_what_a_model_writes_is_legal_behind_its_reasoning(name):
    vocab = vocabulary()
    answers = Answers(template_format(SPECS[name]), vocab.added)
    prompt = "<|im_start|>assistant\n<think>\n"
    guide = answers.guide(choice_of(name, "required"), "")
    assert vocab.follows(guide, CALLS[name])
    assert not vocab.follows(guide, f"No. {CALLS[name]}")
    if name in ("json", "tags"):
        assert vocab.follows(guide, f"<think>hm</think>\n\n{CALLS[name]}")
        opened = answers.guide(choice_of(name, "required"), prompt)
        assert vocab.follows(opened, f"hm</think>\n\n{CALLS[name]}")
        assert not vocab.follows(opened, CALLS[name])


def changed(spec, **change):
    calls = {**spec["fields"]["tool_calls"], **change}
    return {**spec, "fields": {**spec["fields"], "tool_calls": calls}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (changed(JSON_CALLS, open_pattern="(?=x)<a>"), "assert"),
        (changed(JSON_CALLS, open_pattern="[abc]<a>"), "in in it"),
        (changed(JSON_CALLS, content="kv-lines"), "content is kv-lines"),
        (changed(JSON_CALLS, transform={"function": {"name": "f"}}), "no place for the name"),
        (changed(JSON_CALLS, content_args={"unquoted_keys": True}), "between no marks"),
        (changed(MARKED_CALLS, open_pattern=r"<c>(?P<name>[A-Z]+)"), "is not read as one"),
        (changed(TAG_CALLS, content_args={"tag_pattern": "<(?P<key>a)>"}), "no group value"),
        (
            changed(
                TAG_CALLS,
                content_args={
                    "tag_pattern": "<(?P<key>.+)>(?P<value>.*?)</a>",
                    "value_parser": {"name": "json"},
                },
            ),
            "value_parser is",
        ),
    ],
)
def test_forms_that_no_grammar_can_say_are_refused_with_the_reason(spec, words):
    answers = Answers(template_format(spec), AddedTokens())
    with pytest.raises(ApiError, match=words) as caught:
        answers.guide(read_choice([{"function": {"name": "f"}}], "required"), "")
    assert caught.value.param == "tool_choice"
    assert answers.guide(choice_of("tags", "auto", False), "") is None


def test_keywords_that_a_form_cannot_hold_are_refused_by_name():
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}
    marked = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}}}
    for name, each, words in (("tags", function, "type"), ("marked", marked, "pattern")):
        answers = Answers(template_format(SPECS[name]), AddedTokens())
        with pytest.raises(ApiError, match=words) as caught:
            answers.guide(read_choice([{"function": {**each, "strict": True}}]), "")
        assert caught.value.param == "tools"
