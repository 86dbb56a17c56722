"""Turn a guide into the library's own grammar: each kind by its own small function."""

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from slipstream_contract.guide import Guide, GuideKind, GuideOptions

from slipstream.guide.interface import GuideError
from slipstream.guide.schema import prepare
from slipstream.guide.tags import lark_of_tags

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Blanks between the parts of JSON: bounded, or a model may fill its answer with them."""

MAX_GRAMMAR_BYTES = 1 << 16
"""Size of a grammar of one's own: it is translated by the interpreter, which steps need, too."""

_JSON = {"anyOf": [{"type": "object"}, {"type": "array"}]}
_JSON_OBJECT = {"type": "object"}


def grammar_of(guide: Guide) -> str:
    """Return the grammar of a guide. Raises GuideError."""
    try:
        return _LOWER[guide.kind](guide.text, guide.options)
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise GuideError(str(error) or type(error).__name__) from None


def _json(text: str, options: GuideOptions) -> str:
    return grammar_of_schema(_JSON, options)


def _json_object(text: str, options: GuideOptions) -> str:
    return grammar_of_schema(_JSON_OBJECT, options)


def _json_schema(text: str, options: GuideOptions) -> str:
    return grammar_of_schema(json.loads(text), options)


def grammar_of_schema(schema: Any, options: GuideOptions) -> str:
    """Return the grammar of a JSON schema."""
    prepared = {} if schema is True else prepare(schema, options.is_closed)
    if prepared is False:
        raise GuideError("Unsatisfiable schema: it is false")
    return LLMatcher.grammar_from_json_schema(
        json.dumps(prepared),
        overrides=json_options(options),  # type: ignore[arg-type]
    )


def json_options(options: GuideOptions) -> dict[str, object]:
    """Return the library's options for JSON; a schema's own `x-guidance` does not change them."""
    return {
        "whitespace_flexible": not options.is_compact,
        "whitespace_pattern": None
        if options.is_compact
        else options.whitespace_pattern or WHITESPACE,
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": False,
        "lenient": False,
    }


def _regex(text: str, options: GuideOptions) -> str:
    return LLMatcher.grammar_from_regex(text)


def _grammar(text: str, options: GuideOptions) -> str:
    """Take GBNF, which defines rules by `::=`, or Lark as the library has it."""
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GuideError(f"a grammar of {size} bytes, at most {MAX_GRAMMAR_BYTES} are served")
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def _choice(text: str, options: GuideOptions) -> str:
    return LLMatcher.grammar_from_regex(regex_of_choices(json.loads(text)))


def _tag(text: str, options: GuideOptions) -> str:
    return lark_of_tags(json.loads(text), json_options(options), options.is_closed)


def _tools(text: str, options: GuideOptions) -> str:
    """Return a grammar of tool calls, to which the schemas of arguments are added as rules."""
    given = json.loads(text)
    own = {key: value for key, value in json_options(options).items() if value is not None}
    rules = [given["lark"]]
    for name, schema in given["schemas"].items():
        made = prepare(schema, options.is_closed)
        if made is False:
            raise GuideError("Unsatisfiable schema: it is false")
        made = made if isinstance(made, dict) else {}
        rules.append(f"{name}: %json {json.dumps({**made, 'x-guidance': own})}")
    return LLMatcher.grammar_from_lark("\n".join(rules) + "\n")


_LOWER: dict[GuideKind, Callable[[str, GuideOptions], str]] = {
    GuideKind.JSON: _json,
    GuideKind.JSON_OBJECT: _json_object,
    GuideKind.JSON_SCHEMA: _json_schema,
    GuideKind.REGEX: _regex,
    GuideKind.GRAMMAR: _grammar,
    GuideKind.CHOICE: _choice,
    GuideKind.STRUCTURAL_TAG: _tag,
    GuideKind.TOOLS: _tools,
}


def regex_of_choices(choices: list[str]) -> str:
    """Return an expression of these texts, of which thousands compile.

    A backslash makes `<` and `>` boundaries of words, and other marks themselves.
    """
    return "|".join(re.sub(r"([!-/:;=?@\[-`{-~])", r"\\\1", text) for text in choices)
