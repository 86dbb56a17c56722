"""No output is invalid: a fixed sample of schemas, and others drawn at random, by `jsonschema`.

The model is the grammar's own masks under random choices: every output that they allow may come,
also those that no model would write.
"""

import ctypes
import json
import random

import pytest
from fixtures.guide.real import END, VOCAB_SIZE, GuidedEngine, compiler, guide, vocabulary
from fixtures.guide.schemas import REFUSED, SCHEMAS, random_schemas, text_of
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import ValidationError, validators
from slipstream.guide.disjoint import Budget, are_disjoint
from slipstream.guide.interface import GuideError
from slipstream.guide.schema import prepare


def is_valid(value: object, schema: object) -> bool:
    try:
        validators.validator_for(schema, validators.Draft202012Validator)(schema).validate(value)
    except ValidationError:
        return False
    return True


def random_text(schema: object, seed: int, most: int = 60) -> str | None:
    """Return a text of random legal tokens, ends more often; None: it gets too long."""
    rng, end = random.Random(seed), False
    matcher = compiler().compile(guide("json_schema", text_of(schema), is_compact=seed % 2 == 0))
    place, words, data = matcher.matcher.copy(), (ctypes.c_uint32 * (VOCAB_SIZE // 32))(), b""
    for _ in range(most):
        place.fill(ctypes.addressof(words))
        legal = [i for i in range(VOCAB_SIZE) if words[i >> 5] >> (i & 31) & 1]
        end = place.is_accepting and (legal in ([END], []) or rng.random() < 0.5)
        if end:
            return data.decode()
        wanted = [i for i in legal if i != END]
        closing = [i for i in wanted if vocabulary().raw(i)[:1] in b'"}],']
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else wanted)
        assert place.take(token_id)
        data += vocabulary().raw(token_id)
    return None


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


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-60, 60), st.text("ak", max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(random_schemas, st.lists(VALUES, max_size=12))
def test_what_is_rewritten_has_the_same_values(schema, values):
    made = prepare(schema)
    for value in values:
        assert is_valid(value, schema) == is_valid(value, made)


@settings(max_examples=100, deadline=None)
@given(random_schemas, random_schemas, st.lists(VALUES, max_size=12))
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
