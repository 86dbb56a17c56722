"""A guide holds behind the end of thinking, where thinking is on."""

import json

import pytest
from fixtures.engine.eager import Eager
from fixtures.guide.real import END, GuidedEngine, guide, ids_of, vocabulary
from fixtures.guide.schemas import is_valid
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.thinking import Thinking
from slipstream.drafting.forced import WithForced
from slipstream.drafting.lookup import PromptLookup
from slipstream.engine.scheduler import Limits
from slipstream_contract.errors import ContractError
from slipstream_contract.guide import vllm_guide

OPENER = ids_of("@")
SCHEMA = {"type": "array", "items": {"enum": [1, True, None]}, "maxItems": 3}
MARKERS = [(ids_of("~")[0],), tuple(ids_of("</think>"))]


def wanted(in_thinking=None, schema=SCHEMA):
    return guide("json_schema", json.dumps(schema), in_thinking=in_thinking)


def parts(engine, number, marker):
    """Return the outputs up to the marker, and the text behind it; None without a marker."""
    ids = engine.outputs[number, 0]
    for end in range(len(marker), len(ids) + 1):
        if tuple(ids[end - len(marker) : end]) == marker:
            return ids[:end], b"".join(vocabulary().raw(i) for i in ids[end:]).decode()
    return None


@settings(max_examples=12, deadline=None)
@given(
    marker=st.sampled_from(MARKERS),
    budget=st.integers(0, 9),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    drafts=st.sampled_from([0, 6]),
    how=st.sampled_from([{}, {"top_k": 9}, {"top_p": 0.7}, {"num_log_probs": 2}]),
)
def test_json_comes_behind_thoughts_that_may_be_anything(marker, budget, seeds, drafts, how):
    speculation = Eager(WithForced(PromptLookup()), drafts) if drafts else None
    thinking, limits = Thinking("~", marker, OPENER[0]), Limits(16, 512, max_num_rows=128)
    engine = GuidedEngine(limits=limits, speculation=speculation, thinking=thinking)
    more = {k: v for k, v in how.items() if k != "num_log_probs"}
    more |= {"log_probs": True} if "num_log_probs" in how else {}
    bias = {"bias": ((END, 20.0),)}  # ends are likely, and not legal in thoughts
    numbers = [
        engine.submit(
            [*ids_of("x = "), *OPENER],
            wanted(),
            temperature=1.0,
            seed=seed,
            thinking_token_budget=budget,
            **more,
            **bias,
        )
        for seed in seeds
    ]
    engine.drain()
    for number in numbers:
        found = parts(engine, number, marker)
        assert found is not None
        thoughts, text = found
        assert len(thoughts) <= budget + len(marker)
        assert END not in thoughts
        assert engine.reason(number) in ("stop", "end")
        assert is_valid(json.loads(text), SCHEMA), text


def starts_at_once(prompt, in_thinking=None, default=False, has_thinking=True):
    thinking = Thinking("~", MARKERS[0], OPENER[0]) if has_thinking else None
    limits = Limits(16, 512, guide_in_thinking=default)
    engine = GuidedEngine(thinking=thinking, limits=limits)
    number = engine.submit(prompt, wanted(in_thinking, {"enum": ["k"]}), max_tokens=6)
    engine.drain()
    return engine.text(number) == '"k"'


TEXT, MARK = ids_of("x = "), list(MARKERS[0])


@pytest.mark.parametrize(
    ("prompt", "in_thinking", "default", "is_at_once"),
    [
        ([*TEXT, *OPENER], None, False, False),  # the prompt opens it
        ([*TEXT, *OPENER, *TEXT, *MARK], None, False, True),  # and closes it
        ([*OPENER, *MARK, *TEXT, *OPENER], None, False, False),  # opens it again
        (TEXT, None, False, True),  # it says nothing
        (TEXT, False, False, False),  # but the request does
        ([*TEXT, *OPENER], True, False, True),
        ([*TEXT, *OPENER], None, True, True),  # the engine's option
        ([*TEXT, *OPENER], False, True, False),
        ([*TEXT, *OPENER, *MARK], False, False, True),
    ],
)
def test_where_a_guide_begins(prompt, in_thinking, default, is_at_once):
    assert starts_at_once(prompt, in_thinking, default) == is_at_once


def test_a_model_that_does_not_think_is_guided_at_once():
    assert starts_at_once([*TEXT, *OPENER], False, has_thinking=False)


def test_a_request_says_it_as_vllm_does():
    made = [
        vllm_guide({"structured_outputs": {"json": {}, "enable_in_reasoning": flag}})
        for flag in (True, False, None)
    ]
    assert [each.options.in_thinking for each in made] == [True, False, None]
    with pytest.raises(ContractError, match="enable_in_reasoning is 'no'"):
        vllm_guide({"structured_outputs": {"json": {}, "enable_in_reasoning": "no"}})
