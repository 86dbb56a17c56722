"""Guides: what an output must be, such as JSON of a schema, in any contract's words.

The bounds are checked where a request is read and again where it is compiled. Whether a schema, an
expression or a grammar can be compiled is the engine's to know.
"""

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from slipstream_contract.errors import ContractError, clip

MAX_GUIDE_BYTES = 1 << 20
MAX_GUIDE_NESTING = 64
MAX_CHOICES = 10_000
MAX_WHITESPACE_BYTES = 1024


class GuideKind(StrEnum):
    """The language that a guide's text is in."""

    JSON = "json"  # any object or array; no text
    JSON_OBJECT = "json_object"  # any object; no text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "ebnf_grammar"  # GBNF, or the library's own Lark
    CHOICE = "choice"  # the text is a JSON list of texts
    STRUCTURAL_TAG = "structural_tag"  # JSON
    TOOLS = "tools"  # JSON of `lark`, a grammar, and `schemas`, which are rules of it by name


class GuideOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a guide: of JSON, but for the last.

    Attributes:
        whitespace_pattern: an expression for blanks between the parts of JSON; empty: at most 16.
        is_compact: there are no blanks at all.
        is_closed: objects have no properties but those of their schema, where it does not say.

    And of all guides:
        in_thinking: whether it holds from the first token on, thinking included; None: as the
            engine has it.
    """

    whitespace_pattern: str = ""
    is_compact: bool = False
    is_closed: bool = False
    in_thinking: bool | None = None


class Guide(msgspec.Struct, frozen=True):
    """A language and a text in it; the output is what the text describes, from first to last."""

    kind: GuideKind
    text: str = ""
    options: GuideOptions = GuideOptions()


_PLAIN = {GuideKind.JSON, GuideKind.JSON_OBJECT}
_JSON_TEXTS = {
    GuideKind.JSON_SCHEMA,
    GuideKind.CHOICE,
    GuideKind.STRUCTURAL_TAG,
    GuideKind.TOOLS,
}


def check_guide(field: str, guide: Guide) -> None:
    """Raise ContractError naming field, value and bound for a guide that breaks a bound."""
    size = len(guide.text.encode(errors="replace"))
    if size > MAX_GUIDE_BYTES:
        raise ContractError(f"{field} has {size} bytes, at most {MAX_GUIDE_BYTES} are served")
    size = len(guide.options.whitespace_pattern.encode(errors="replace"))
    if size > MAX_WHITESPACE_BYTES:
        raise ContractError(
            f"whitespace_pattern has {size} bytes, at most {MAX_WHITESPACE_BYTES} are served"
        )
    if guide.options.is_compact and guide.options.whitespace_pattern:
        raise ContractError("whitespace_pattern and disable_any_whitespace contradict each other")
    if guide.kind not in _PLAIN and not guide.text:
        raise ContractError(f"{field} is empty: {guide.kind} needs a text")
    if guide.kind in _JSON_TEXTS:
        value = parse_json(field, guide.text)
        check_nesting(field, value)
        if guide.kind is GuideKind.JSON_SCHEMA and not isinstance(value, dict | bool):
            raise ContractError(f"{field} is {clip(guide.text)}, not a JSON schema")
        if guide.kind is GuideKind.STRUCTURAL_TAG and not isinstance(value, dict):
            raise ContractError(f"{field} is {clip(guide.text)}, not a JSON object")
        if guide.kind is GuideKind.CHOICE:
            _check_choices(field, value)
        if guide.kind is GuideKind.TOOLS:
            _check_tools(field, value)


def parse_json(field: str, text: str) -> Any:
    """Return the value of a JSON text. Raises ContractError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ContractError(
            f"{field} is nested too deeply, at most {MAX_GUIDE_NESTING} levels are served"
        ) from None
    except json.JSONDecodeError as error:
        start = text[error.pos : error.pos + 33]
        raise ContractError(
            f"{field} is not JSON: {error.msg} at character {error.pos}: {clip(start)}"
        ) from None
    except ValueError as error:
        raise ContractError(f"{field} is not JSON: {clip(str(error))}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def check_nesting(field: str, value: object) -> None:
    """Raise ContractError if a JSON value has more than `MAX_GUIDE_NESTING` levels."""
    level: list[object] = [value]
    for _ in range(MAX_GUIDE_NESTING + 1):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return
    raise ContractError(
        f"{field} is nested too deeply, at most {MAX_GUIDE_NESTING} levels are served"
    )


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_tools(field: str, value: object) -> None:
    grammar = value.get("lark") if isinstance(value, dict) else None
    schemas = value.get("schemas") if isinstance(value, dict) else None
    if not isinstance(grammar, str) or not isinstance(schemas, dict):
        raise ContractError(f"{field} is {clip(value)}, not an object of lark and schemas")


def _check_choices(field: str, value: object) -> None:
    if not isinstance(value, list):
        raise ContractError(f"{field} is {clip(value)}, not a list of texts")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise ContractError(f"{field} has {len(value)} texts, not from 1 to {MAX_CHOICES}")
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise ContractError(f"{field}[{index}] is {clip(item)}, not a text of a character")


# --- the tensors of TensorRT-LLM -----------------------------------------------------------------

TYPE_FIELD, TEXT_FIELD = "guided_decoding_guide_type", "guided_decoding_guide"
_TRTLLM_KINDS = (
    GuideKind.JSON,
    GuideKind.JSON_SCHEMA,
    GuideKind.REGEX,
    GuideKind.GRAMMAR,
    GuideKind.STRUCTURAL_TAG,
)


def trtllm_guide(kind: str | None, text: str | None) -> Guide | None:
    """Return the guide of the two inputs; None without them. Raises ContractError."""
    if not kind:
        if text:
            raise ContractError(f"{TEXT_FIELD} is {clip(text)} without a {TYPE_FIELD}")
        return None
    if kind not in _TRTLLM_KINDS:
        known = ", ".join(_TRTLLM_KINDS)
        raise ContractError(f"{TYPE_FIELD} is {clip(kind)}, not one of {known}")
    if kind == GuideKind.JSON and text:
        raise ContractError(
            f"{TEXT_FIELD} is {clip(text)}, but type json has none: json_schema takes a schema"
        )
    guide = Guide(GuideKind(kind), text or "")
    check_guide(TEXT_FIELD, guide)
    return guide


# --- vLLM's parameters ---------------------------------------------------------------------------

STRUCTURED, OLD = "structured_outputs", "guided_decoding"
_VLLM_KINDS = {
    "json": GuideKind.JSON_SCHEMA,
    "regex": GuideKind.REGEX,
    "choice": GuideKind.CHOICE,
    "grammar": GuideKind.GRAMMAR,
    "json_object": GuideKind.JSON_OBJECT,
    "structural_tag": GuideKind.STRUCTURAL_TAG,
}
_IN_THINKING = "enable_in_reasoning"
_VLLM_FLAGS = ("disable_any_whitespace", "disable_additional_properties")
# Of vLLM's internals or of other libraries: served where they ask for nothing.
_EITHER = (None, False, True)
_IGNORED = {
    "disable_fallback": _EITHER,
    "backend_was_auto": _EITHER,  # Triton's frontend sends vLLM's whole struct
    "_backend_was_auto": _EITHER,
    "backend": (None, ""),
    "_backend": (None, ""),
}
_FLAT = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "json_object")}
_FLAT["guided_whitespace_pattern"] = "whitespace_pattern"
_MAY_BE_FALSE = ("json_object", _IN_THINKING, *_VLLM_FLAGS, *_IGNORED)
_EMPTY: tuple[object, ...] = (None, "", {})  # of `structured_outputs`: no guide
VLLM_NAMES = frozenset({STRUCTURED, OLD, *_FLAT})


def vllm_guide(given: Mapping[str, object]) -> Guide | None:
    """Return the guide among vLLM's parameters; None without one. Raises ContractError."""
    named = {name: given[name] for name in (STRUCTURED, OLD) if given.get(name) not in _EMPTY}
    flat = {
        name: given[name] for name, key in _FLAT.items() if not _is_nothing(key, given.get(name))
    }
    if len(named) + bool(flat) > 1:
        both = " and ".join([*named, *list(flat)[:1]])
        raise ContractError(f"{both} are given but mean the same")
    for field, value in named.items():
        return _guide_of(field, _as_object(field, value), {})
    if not flat:
        return None
    return _guide_of("", {_FLAT[name]: value for name, value in flat.items()}, _UNFLAT)


_UNFLAT = {name: flat for flat, name in _FLAT.items()}


def _is_nothing(key: str, value: object) -> bool:
    """Return whether a value asks for nothing; of JSON schemas `false` does: for no text at all."""
    return value is None or value == "" or (value is False and key in _MAY_BE_FALSE)


def _as_object(field: str, value: object) -> Mapping[str, object]:
    if isinstance(value, str):
        size = len(value.encode(errors="replace"))
        if size > MAX_GUIDE_BYTES:
            raise ContractError(f"{field} has {size} bytes, at most {MAX_GUIDE_BYTES} are served")
        value = parse_json(field, value)
    if not isinstance(value, dict):
        raise ContractError(f"{field} is {clip(value)}, not an object")
    return value


def _guide_of(field: str, values: Mapping[str, object], names: Mapping[str, str]) -> Guide | None:
    """Return the guide of an object; `names` has what errors call a key beside `field.key`."""

    def label(key: str) -> str:
        return names.get(key, f"{field}.{key}")

    empty = [key for key in _VLLM_KINDS if field and values.get(key) == ""]
    if empty:  # of a field of its own it is no guide
        raise ContractError(f"{label(empty[0])} is empty")
    given = {key: value for key, value in values.items() if not _is_nothing(key, value)}
    for key, value in given.items():
        if key in _IGNORED and value not in _IGNORED[key]:
            raise ContractError(f"{label(key)} is {clip(value)}, but there is one library only")
        if key not in {*_VLLM_KINDS, *_VLLM_FLAGS, *_IGNORED, _IN_THINKING, "whitespace_pattern"}:
            known = ", ".join([*_VLLM_KINDS, *_VLLM_FLAGS, _IN_THINKING, "whitespace_pattern"])
            raise ContractError(f"{label(clip(key))} is not known, but {known}")
    kinds = [key for key in _VLLM_KINDS if key in given]
    if len(kinds) != 1:
        if not kinds and not given:
            return None
        found = " and ".join(label(key) for key in kinds) or "none"
        raise ContractError(f"{found} given, exactly one of {', '.join(_VLLM_KINDS)} is served")
    flags = {key: _flag(label(key), given.get(key, False)) for key in _VLLM_FLAGS}
    pattern = given.get("whitespace_pattern", "")
    if not isinstance(pattern, str):
        raise ContractError(f"{label('whitespace_pattern')} is {clip(pattern)}, not a text")
    (key,) = kinds
    wanted = values.get(_IN_THINKING)
    options = GuideOptions(
        whitespace_pattern=pattern,
        is_compact=flags["disable_any_whitespace"],
        is_closed=flags["disable_additional_properties"],
        in_thinking=None if wanted is None else _flag(label(_IN_THINKING), wanted),
    )
    guide = Guide(_VLLM_KINDS[key], _text(label(key), _VLLM_KINDS[key], given[key]), options)
    check_guide(label(key), guide)
    return guide


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ContractError(f"{field} is {clip(value)}, neither true nor false")
    return value


def _text(field: str, kind: GuideKind, value: object) -> str:
    """Return the text of a guide; JSON may come as a value instead."""
    if kind is GuideKind.JSON_OBJECT:
        if value is not True:
            raise ContractError(f"{field} is {clip(value)}, not true")
        return ""
    if kind in _JSON_TEXTS and not isinstance(value, str):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (RecursionError, ValueError):
            raise ContractError(f"{field} is no JSON, or is nested too deeply") from None
    if not isinstance(value, str):
        raise ContractError(f"{field} is {clip(value)}, not a text")
    return value
