"""Tables of fields: what they refuse, with which words, and what documents show of them."""

from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
from slipstream_gateway.dialects.messages_fields import TABLE as MESSAGES
from slipstream_gateway.dialects.openai_fields import CHAT, COMPLETION, TABLES
from slipstream_gateway.dialects.responses_fields import TABLE as RESPONSES
from slipstream_gateway.errors import ApiError
from slipstream_gateway.fields import Field, Table, Use

ROOT = Path(__file__).resolve().parents[2]
FIELDS = (
    Field("model", "chooses the model", str, is_required=True),
    Field("max", "limits the tokens", Annotated[int, msgspec.Meta(ge=1, le=9)]),
    Field("parts", "are counted", list[dict[str, int]]),
    Field("user", "nobody reads it", str, use=Use.HARMLESS),
    Field("wait", "nothing waits", use=Use.REFUSED, neutral=(False,)),
    Field("image", "there are no eyes", use=Use.REFUSED),
)
TABLE = Table(FIELDS)


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
        ({"model": "m", "wait": True}, "wait", "wait is true, which is not served: nothing waits"),
        ({"model": "m", "wait": 0}, "wait", "wait is 0"),
        ({"model": "m", "image": 0}, "image", "image is 0, which is not served: there are no eyes"),
        ({"model": ["x" * 999]}, "model", "xxx..."),
    ],
)
def test_bad_bodies_name_field_value_and_limit(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        TABLE.check(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert says in caught.value.message
    assert len(caught.value.message) < 300


def test_null_is_no_field_and_the_ignored_are_named() -> None:
    body = {"model": "m", "max": 9, "user": "u", "wait": False, "image": None}
    TABLE.check(body)
    assert TABLE.ignored(body) == ["user"]


def test_the_schema_agrees_with_the_check() -> None:
    valid = jsonschema.Draft202012Validator(TABLE.schema())
    assert valid.is_valid({"model": "m", "max": 9, "user": None, "wait": False})
    for body in ({}, {"model": "m", "max": 10}, {"model": "m", "wait": True}, {"model": 1}):
        assert not valid.is_valid(body)


def test_documents_show_every_field_once() -> None:
    text = TABLE.markdown()
    assert "| `model` | required | chooses the model |" in text
    assert "| `user` | no effect | nobody reads it |" in text
    assert "| `wait` | only `false` | nothing waits |" in text
    assert "| `image` | 400 | there are no eyes |" in text
    assert text.count("\n") == 2 + len(TABLE)


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "responses.md").read_text()
    for table in (RESPONSES, MESSAGES):
        assert table.markdown() in page, "run `make fields`"
    jsonschema.Draft202012Validator.check_schema(RESPONSES.schema())
    jsonschema.Draft202012Validator.check_schema(MESSAGES.schema())


def test_an_open_table_lists_what_it_does_not_know():
    table = Table(FIELDS, is_open=True)
    body = {"model": "m", "zz": 1, "user": "u"}
    table.check(body)
    assert table.ignored(body) == ["zz", "user"]
    assert jsonschema.Draft202012Validator(table.schema()).is_valid(body)


def test_a_chat_and_a_completion_refuse_what_only_the_other_has():
    for at, name, value in ((CHAT, "prompt", "a"), (COMPLETION, "tools", [])):
        own = {"messages": [{}]} if at == CHAT else {"prompt": "a"}
        with pytest.raises(ApiError, match=f"{name} is .*, which is not served: it is a field of"):
            TABLES[at].check({**own, name: value})
        TABLES[at].check({**own, name: None})
        assert not jsonschema.Draft202012Validator(TABLES[at].schema()).is_valid(
            {**own, name: value}
        )
