"""`response_format`: what an answer must be, as a guide of the contract."""

import json
from collections.abc import Mapping
from typing import Any

from slipstream_contract.errors import ContractError, clip
from slipstream_contract.guide import Guide, GuideKind, check_guide

_FIELD = "response_format"
_KINDS = ("text", "json_object", "json_schema", "structural_tag")


def read_response_format(body: Mapping[str, Any]) -> Guide | None:
    """Return the guide of a body's `response_format`; None: any text. Raises ContractError."""
    given = body.get(_FIELD)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ContractError(f"{_FIELD} is {clip(given)}, not an object")
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(GuideKind.JSON_OBJECT)
    if kind == "json_schema":
        return _of_schema(given.get("json_schema"))
    if kind == "structural_tag":
        guide = Guide(GuideKind.STRUCTURAL_TAG, _written(_FIELD, given))
        check_guide(_FIELD, guide)
        return guide
    raise ContractError(f"{_FIELD}.type is {clip(kind)}, not one of {', '.join(_KINDS)}")


def _of_schema(wrapper: object) -> Guide:
    """Return the guide of the schema within its wrapper: name, schema, strict, description."""
    field = f"{_FIELD}.json_schema"
    if not isinstance(wrapper, dict):
        raise ContractError(f"{field} is {clip(wrapper)}, not an object with a schema")
    schema = wrapper.get("schema", wrapper.get("json_schema"))
    if schema is None:
        raise ContractError(f"{field}.schema is missing")
    guide = Guide(GuideKind.JSON_SCHEMA, _written(f"{field}.schema", schema))
    check_guide(f"{field}.schema", guide)
    return guide


def _written(field: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        raise ContractError(f"{field} is nested too deeply") from None
