"""Turns that a family's chat template writes down are read back, whatever is in them."""

import json

import pytest
from fixtures.gateway.chat_templates import FAMILIES, template
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_gateway.answer import Answer
from slipstream_gateway.parsing.detect import detect

NAMES = ("serving", "chat_templates")
PLAIN = st.text(st.sampled_from("abz09 ,.'\"\\é漢😀"), min_size=1, max_size=12).map(str.strip)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(max_size=12).filter(lambda text: "<" not in text),
        "days": st.integers(-(2**53), 2**53),
        "units": st.dictionaries(PLAIN, st.lists(st.booleans(), max_size=2), max_size=2),
    },
)
TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "object"}}
DRAWN_TOOLS = st.sampled_from(
    [
        {"name": "f", "parameters": {"type": "object", "properties": TYPES}},
        {"name": "f", "description": None, "parameters": None, "strict": False},
        {"name": "f", "description": "Tells.", "parameters": {}},
    ]
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_is_read_back(load, name):
    family, source, templates = FAMILIES[name], template(name), load.chat_templates
    assert detect(source).name == family.form

    @settings(max_examples=15, deadline=None)
    @given(
        calls=st.lists(st.tuples(st.just("f"), ARGUMENTS), min_size=1, max_size=family.most),
        text=PLAIN if family.has_text else st.just(""),
        reasoning=PLAIN if family.has_reasoning else st.just(""),
        function=DRAWN_TOOLS,
    )
    def check(calls, text, reasoning, function):
        tools = [{"type": "function", "function": function}]
        if not function["parameters"]:  # without a type a text between tags is what it looks like
            calls = [(name, {"days": 3}) for name, _ in calls]
        turn = templates.Turn(calls, text, reasoning)
        prompt, answer = templates.written(source, turn, tools)
        found = templates.read(source, prompt, answer.partition(family.end)[0], tools)
        assert templates.calls_of(found) == calls
        assert (found.text.strip(), found.reasoning.strip()) == (text, reasoning)

    check()


def test_the_judge_says_what_differs(load, monkeypatch):
    source = template("qwen2")
    found = load.chat_templates.judge(source)
    assert found == {"form": "hermes", "turns": {"read": 8}}
    monkeypatch.setattr(load.chat_templates, "read", lambda *_: Answer())
    found = load.chat_templates.judge(source)
    assert found["turns"] == {"differs": 8}
    assert '{"name": "get_weather"' in found["differs"]
    unknown = load.chat_templates.judge("{{ messages | tojson }}")
    assert json.dumps(unknown).count("no form that is known") == 1
