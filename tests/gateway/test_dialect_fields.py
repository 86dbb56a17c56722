"""Tables of fields: what they refuse, with which words, and what documents show of them."""

from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
from slipstream_gateway.dialects.fields import (
    Harmless,
    Mapped,
    Refused,
    check,
    ignored,
    markdown,
    schema,
)
from slipstream_gateway.dialects.messages_fields import TABLE as MESSAGES
from slipstream_gateway.dialects.responses_fields import TABLE as RESPONSES
from slipstream_gateway.errors import ApiError

ROOT = Path(__file__).resolve().parents[2]
TABLE = {
    "model": Mapped(str, "chooses the model", required=True),
    "max": Mapped(Annotated[int, msgspec.Meta(ge=1, le=9)], "limits the tokens"),
    "parts": Mapped(list[dict[str, int]], "are counted"),
    "user": Harmless(str, "nobody reads it"),
    "wait": Harmless(bool, "nothing waits", values=(False,)),
    "image": Refused("there are no eyes"),
}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "model", "Missing required field `model`"),
        ({"model": None}, "model", "Missing required field `model`"),
        ({"model": "m", "extra": None}, "extra", "Unknown field `extra`"),
        ({"model": "m", "max": 10}, "max", "`max`: Expected `int` <= 9; got 10"),
        ({"model": "m", "max": True}, "max", "`max`: Expected `int`, got `bool`; got true"),
        ({"model": "m", "parts": [{}, {"a": "b"}]}, "parts[1][...]", "Expected `int`, got `str`"),
        ({"model": "m", "user": 1}, "user", "Expected `str`, got `int`"),
        ({"model": "m", "wait": True}, "wait", "only false is supported, as nothing waits"),
        ({"model": "m", "image": 0}, "image", "`image` is not supported: there are no eyes"),
        ({"model": ["x" * 999]}, "model", "xxx..."),
    ],
)
def test_bad_bodies_name_field_value_and_limit(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        check(TABLE, body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert says in caught.value.message
    assert len(caught.value.message) < 300


def test_null_is_no_field_and_the_ignored_are_named() -> None:
    body = {"model": "m", "max": 9, "user": "u", "wait": False, "image": None}
    check(TABLE, body)
    assert ignored(TABLE, body) == ["user"]


def test_the_schema_agrees_with_the_check() -> None:
    valid = jsonschema.Draft202012Validator(schema(TABLE))
    assert valid.is_valid({"model": "m", "max": 9, "user": None, "wait": False})
    for body in ({}, {"model": "m", "max": 10}, {"model": "m", "wait": True}, {"model": 1}):
        assert not valid.is_valid(body)


def test_documents_show_every_field_once() -> None:
    text = markdown(TABLE)
    assert "| `model` | required | chooses the model |" in text
    assert "| `user` | ignored | nobody reads it |" in text
    assert "| `wait` | only `false` | nothing waits |" in text
    assert "| `image` | 400 | there are no eyes |" in text
    assert text.count("\n") == 2 + len(TABLE)


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "responses.md").read_text()
    for table in (RESPONSES, MESSAGES):
        assert markdown(table) in page, "run `make fields`"
    jsonschema.Draft202012Validator.check_schema(schema(RESPONSES))
    jsonschema.Draft202012Validator.check_schema(schema(MESSAGES))
