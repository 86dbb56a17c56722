"""The grammar of each format: every answer that it accepts has calls that follow the schemas."""

import json
import random
from dataclasses import replace

import jsonschema
import pytest
from fixtures.gateway.recorded import RECORDED, by_name, parsed
from fixtures.gateway.walks import vocabulary
from fixtures.guide.real import compiler
from fixtures.tiers import quick_of
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.answers import Answers, format_of
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.parsing.format import AddedTokens
from slipstream_gateway.parsing.formats import CALLS, HARMONY

SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50},
        "ratio": {"type": "number"},
        "order": {"enum": ["up", "down", "5", ""]},
        "either": {"type": ["string", "null"]},
        "short": {"type": "string", "maxLength": 4},
        "deep": {"$ref": "#/$defs/node"},
        "flag": {"type": "boolean"},
        "mixed": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}]},
    },
    "required": ["query", "flag"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
            "required": ["tags"],
            "additionalProperties": False,
        }
    },
}
LAST = {
    "type": "object",
    "properties": {"first": {"type": "integer"}, "last": {"type": "boolean"}},
    "required": ["last"],
    "additionalProperties": False,
}
SCHEMAS = {"search": SEARCH, "last": LAST, "now": {"type": "object", "properties": {}}}


def tools(strict=True):
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


NAMES = [*CALLS, HARMONY]
NAMED = {"type": "function", "function": {"name": "last"}}


def answers_and_vocabulary(name, with_tokens):
    """The format over a vocabulary that has its markers as tokens, or spells them."""
    form = format_of(name, {"mistral": "mistral", HARMONY: None}.get(name, "qwen3"))
    own = by_name(name)
    special = own.special
    if name == HARMONY:
        with_tokens = True
    visible = tuple(sorted(form.markers() - {*special} - {"<function=", "<parameter="}))
    visible = tuple(each for each in visible if each[0] in "<[" and each[-1] in ">]")
    vocab = vocabulary(special, visible) if with_tokens else vocabulary()
    return Answers(form, vocab.added), vocab


def check_calls(answer, where):
    for call in answer.calls:
        assert call.name in SCHEMAS, where
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def hints(answers):
    """What random tokens hardly spell."""
    return [
        *sorted(answers.format.markers()),
        *('"', "}", "]", ")", "\n", "\n</parameter>"),
        *"1<\\",
    ]


def walked(name, choice, with_tokens, seed, prompt=""):
    answers, vocab = answers_and_vocabulary(name, with_tokens)
    guide = answers.guide(choice, prompt)
    taken = vocab.walk(guide, seed, hints(answers))
    if taken is None:
        return None, ""
    made = vocab.tokens(taken)
    written = "".join(text or f"<{token_id}>" for token_id, text in made)
    return parsed(answers, made, [random.Random(seed).randint(1, 9)], prompt, choice), written


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", quick_of([range(2), range(2, 60)], [range(2)]), ids=str)
def test_a_required_call_comes_and_follows_its_schema(name, with_tokens, seeds):
    choice = read_choice(tools(), "required")
    ended = 0
    for seed in seeds:
        answer, written = walked(name, choice, with_tokens, seed)
        if answer is None:
            continue
        ended += 1
        assert answer.calls, written
        assert answer.text == "", written
        check_calls(answer, written)
    assert ended or len(seeds) < 9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", quick_of([range(1), range(1, 30)], [range(1)]), ids=str)
def test_a_named_call_is_the_only_one(name, seeds):
    for seed in seeds:
        answer, written = walked(name, read_choice(tools(), NAMED), True, seed)
        if answer is not None:
            assert [call.name for call in answer.calls] == ["last"], written
            check_calls(answer, written)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", quick_of([range(1), range(1, 30)], [range(1)]), ids=str)
def test_without_parallel_calls_there_is_one(name, seeds):
    for seed in seeds:
        answer, written = walked(name, read_choice(tools(), "required", False), False, seed)
        if answer is not None:
            assert len(answer.calls) == 1, written
        answer, written = walked(name, read_choice(tools(None), "auto", False), False, seed)
        if answer is not None:
            assert len(answer.calls) <= 1, written


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", quick_of([range(2), range(2, 60)], [range(2)]), ids=str)
def test_strict_calls_in_free_text_follow_their_schemas(name, with_tokens, seeds):
    choice = read_choice(tools(), "auto")
    for seed in seeds:
        answer, written = walked(name, choice, with_tokens, seed)
        if answer is not None:
            check_calls(answer, written)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", quick_of([range(1), range(1, 30)], [range(1)]), ids=str)
def test_an_answer_of_a_schema_is_that_or_calls(name, seeds):
    choice = read_choice(tools(None))
    kinds = set()
    for seed in seeds:
        answers, vocab = answers_and_vocabulary(name, True)
        guide = answers.guide(choice, "", answer=LAST)
        taken = vocab.walk(guide, seed, hints(answers))
        if taken is None:
            continue
        got = parsed(answers, vocab.tokens(taken), [3], "", choice, True)
        kinds.add(bool(got.calls))
        if not got.calls:
            jsonschema.validate(json.loads(got.text), LAST)
    assert kinds or len(seeds) < 9


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each.tool_parser)
def test_what_a_family_writes_is_legal(recorded):
    """The grammar is that of the family's own form: a recorded answer follows it."""
    form = format_of(recorded.tool_parser, recorded.reasoning_parser)
    visible = tuple(
        each
        for each in sorted(form.markers() - {*recorded.special})
        if each[0] == "<" and each[-1] == ">"
    )
    vocab = vocabulary(recorded.special, visible)
    answers = Answers(form, vocab.added)
    weather = {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    }
    given = [{"function": weather}, {"function": {"name": "clock", "strict": True}}]
    if "[TOOL_CALLS][" in recorded.answer:
        given_tokens = AddedTokens({"[TOOL_CALLS]": vocab.added.special["[TOOL_CALLS]"]})
        answers = Answers(form, given_tokens)
    if recorded.answer.startswith(("<|python_start|>", '{"type"', "<|python_tag|>")):
        recorded = (
            replace(recorded, answer=recorded.answer[recorded.answer.index(">") + 1 :])
            if (recorded.answer[0] == "<")
            else replace(recorded, answer=recorded.answer.replace('"type": "function", ', ""))
        )
        recorded = replace(recorded, answer=recorded.answer.removesuffix("<|python_end|>"))
    text = recorded.answer.replace("[CALL_ID]a1b2c3d4e", "")
    text = text.removesuffix("<|call|>")  # ends the answer: gpt-oss has it among its end tokens
    text = text.replace("city='Oslo'", 'city="Oslo"')
    guide = answers.guide(read_choice(given), recorded.prompt)
    assert vocab.follows(guide, text), text


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_compiles_it_within_its_bounds(name):
    for choice in ("auto", "required", NAMED):
        guide = Answers(format_of(name, None), AddedTokens()).guide(
            read_choice(tools(), choice), ""
        )
        compiler().compile(guide)


@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_reasoning_passes_where_a_call_must_come(prompt):
    answers, vocab = answers_and_vocabulary("hermes", False)
    guide = answers.guide(read_choice(tools(), "required"), prompt)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert vocab.follows(guide, f"I think.</think>\n\n{call}") == bool(prompt)
    assert vocab.follows(guide, f"<think>I think.</think>{call}")
    assert vocab.follows(guide, call) != bool(prompt)
    assert not vocab.follows(guide, f"<think>I think.</think>No. {call}")


@pytest.mark.parametrize("name", NAMES)
def test_a_guide_comes_where_it_must(name):
    answers, _ = answers_and_vocabulary(name, True)
    assert answers.guide(read_choice(tools(), "none"), "") is None
    assert answers.guide(read_choice(tools(None)), "") is None
    assert answers.guide(read_choice(tools(False)), "") is None
    assert answers.guide(read_choice(tools(True)), "") is not None
    assert answers.guide(read_choice(tools(False), "required"), "") is not None
    assert answers.guide(read_choice(tools(None), "auto", False), "") is not None


def test_a_model_without_calls_refuses_that_one_must_come():
    answers = Answers(format_of(None, "qwen3"), AddedTokens())
    assert answers.guide(read_choice(tools()), "") is None
    with pytest.raises(ApiError, match="tool_choice is required, but this model's"):
        answers.guide(read_choice(tools(), "required"), "")


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("qwen3_coder", {"type": "object", "minProperties": 1}, "minProperties"),
        ("pythonic", {"anyOf": [{"type": "object"}]}, "anyOf"),
        (
            "glm45",
            {"properties": {"a": {"type": "string", "pattern": "^a"}}},
            "pattern '\\^a'",
        ),
        ("pythonic", {"properties": {"a b": {}}, "required": ["a b"]}, "the name 'a b'"),
        ("glm45", {"required": ["a"]}, "required 'a'"),
    ],
)
def test_strict_schemas_that_a_form_cannot_hold_are_refused(name, schema, words):
    answers, _ = answers_and_vocabulary(name, True)
    function = {"name": "f", "parameters": schema, "strict": True}
    with pytest.raises(ApiError, match=words) as caught:
        answers.guide(read_choice([{"function": function}]), "")
    assert caught.value.param == "tools"
    function["strict"] = False
    assert answers.guide(read_choice([{"function": function}], "required"), "") is not None
