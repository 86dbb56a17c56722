"""Bodies as bytes: a key that is twice is refused however it is written, and only such a key."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_gateway.body import parse_object
from slipstream_gateway.errors import ApiError
from slipstream_gateway.settings import MAX_DEPTH

SPACE = st.sampled_from(["", "", " ", "\n\t", "\r "])
TEXT = st.text(st.sampled_from('\\":{[, ae'), max_size=5)  # what looks like the end of a key


@st.composite
def quoted(draw: st.DrawFn) -> str:
    text = json.dumps(draw(TEXT))
    return text.replace("a", "\\u0061") if draw(st.booleans()) else text


def inner(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(SPACE, quoted(), SPACE, SPACE, values).map(
        lambda part: f"{part[0]}{part[1]}{part[2]}:{part[3]}{part[4]}"
    )
    return st.one_of(
        st.lists(pairs, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}"),
        st.lists(values, max_size=3).map(lambda parts: "[" + ",".join(parts) + "]"),
    )


VALUES = st.recursive(
    st.one_of(quoted(), st.sampled_from(["1", "-0.5", "true", "null"])), inner, max_leaves=8
)
OBJECTS = inner(VALUES).filter(lambda text: text.startswith("{"))


def has_twin(text: str) -> bool:
    found = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found |= len({name for name, _ in pairs}) < len(pairs)

    json.loads(text, object_pairs_hook=look)
    return found


@given(text=OBJECTS)
def test_a_key_that_is_twice_is_refused_and_nothing_else(text: str):
    if has_twin(text):
        with pytest.raises(ApiError, match="is given twice in the body"):
            parse_object(text.encode())
    else:
        assert parse_object(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        r'{"a\\": 1, "a\\" : 2}',
        r'{"a\"": 1, "a\"": 2}',
        r'{"": "\":", "b": {"": 1, "":1}}',
    ],
)
def test_keys_that_end_in_what_was_escaped(text: str):
    with pytest.raises(ApiError, match="is given twice in the body"):
        parse_object(text.encode())


@pytest.mark.parametrize("value", ["1", "[]", '["a"]', '{"a": 1}', '[1, {"a": 2}]'])
def test_depth(value: str):
    own = value.count("[") + value.count("{")
    room = MAX_DEPTH - 1 - own
    parse_object(b'{"a": ' + b"[" * room + value.encode() + b"]" * room + b"}")
    room += 1
    with pytest.raises(ApiError, match="nested too deeply"):
        parse_object(b'{"a": ' + b"[" * room + value.encode() + b"]" * room + b"}")
