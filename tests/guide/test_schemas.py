"""No output is invalid: a fixed sample of schemas, and others drawn at random, by `jsonschema`.

The model is the grammar's own masks under random choices: every output that they allow may come,
also those that no model would write.
"""

import json
import re

import pytest
from fixtures.guide.real import GuidedEngine, compiler, guide
from fixtures.guide.schemas import (
    BOUNDS,
    REFUSED,
    SCHEMAS,
    VALUES,
    conditional,
    is_valid,
    negatable,
    random_schemas,
    random_text,
    text_of,
)
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.guide.disjoint import Budget, are_disjoint
from slipstream.guide.interface import GuideError
from slipstream.guide.negation import any_of, negate, without
from slipstream.guide.schema import prepare


@pytest.mark.parametrize("number", quick_of(range(len(SCHEMAS)), range(0, len(SCHEMAS), 8)))
def test_random_outputs_are_valid(number):
    schema = SCHEMAS[number]
    for seed in range(3):
        text = random_text(schema, seed)
        if text is not None:
            assert is_valid(json.loads(text), schema), text


@settings(max_examples=25, deadline=None)
@given(random_schemas, st.integers(0, 99))
def test_random_outputs_of_random_schemas_are_valid(schema, seed):
    refusal = "oneOf"
    try:
        text = random_text(schema, seed)
    except GuideError as error:
        text, refusal = None, str(error)
    assert "oneOf" in refusal or "nsatisfiable" in refusal
    if text is not None:
        assert is_valid(json.loads(text), schema), text


@pytest.mark.parametrize("keyword", REFUSED)
def test_refused_keywords_are_named(keyword):
    with pytest.raises(GuideError, match=keyword):
        compiler().compile(guide("json_schema", text_of(REFUSED[keyword])))


RANDOM = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-60, 60), st.text("ak", max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(random_schemas, st.lists(RANDOM, max_size=12))
def test_what_is_rewritten_has_the_same_values(schema, values):
    made = prepare(schema)
    for value in values:
        assert is_valid(value, schema) == is_valid(value, made)


@pytest.mark.parametrize("key", BOUNDS)
def test_a_negated_bound_has_all_other_values(key):
    for bound in range(4):
        others = any_of(negate({key: bound}) or [])
        for value in VALUES:
            assert is_valid(value, others) != is_valid(value, {key: bound})


@settings(max_examples=100, deadline=None)
@given(negatable)
def test_a_negation_has_all_other_values(schema):
    others = negate(schema)
    if others is not None:
        for value in VALUES:
            assert is_valid(value, any_of(others)) != is_valid(value, schema)


@settings(max_examples=40, deadline=None)
@given(conditional)
def test_conditions_that_are_rewritten_have_the_same_values(schema):
    made = prepare(schema)
    for value in VALUES:
        assert is_valid(value, schema) == is_valid(value, made)


@settings(max_examples=15, deadline=None)
@given(conditional, st.integers(0, 99))
def test_random_outputs_of_conditions_are_valid(schema, seed):
    try:
        text = random_text(schema, seed, 30)
    except GuideError:
        return  # nothing satisfies it, or it is refused
    if text is not None:
        assert is_valid(json.loads(text), schema), text


@settings(max_examples=60, deadline=None)
@given(st.sets(st.text("a]^ \\-", max_size=3)), st.text("a]^ \\-b", max_size=4))
def test_an_expression_of_all_texts_but_some(words, text):
    assert (re.fullmatch(without(words), text) is None) == (text in words)


@settings(max_examples=100, deadline=None)
@given(random_schemas, random_schemas, st.lists(RANDOM, max_size=12))
def test_disjoint_schemas_share_no_value(one, other, values):
    if are_disjoint(one, other, {}, Budget()):
        assert not any(is_valid(value, one) and is_valid(value, other) for value in values)


def test_the_default_model_follows_a_sample_of_all():
    engine = GuidedEngine()
    some = SCHEMAS[5::12]
    numbers = {
        engine.submit("x = ", guide("json_schema", text_of(s)), temperature=1.0, seed=1): s
        for s in some
    }
    engine.drain()
    assert not engine.rejected
    for number, schema in numbers.items():
        if engine.reason(number) in ("stop", "end"):
            assert is_valid(json.loads(engine.text(number)), schema)
