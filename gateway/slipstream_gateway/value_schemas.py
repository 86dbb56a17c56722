"""JSON schemas of values in request bodies, as far as a schema can say what is served.

What it cannot say stays a refusal of the server: fields that exclude each other, what the model has
(its vocabulary, context and template), what a grammar can be made of, and sizes in bytes.
"""

from collections.abc import Mapping
from typing import Any

from slipstream_contract import limits
from slipstream_contract.guide import MAX_CHOICES
from slipstream_contract.log_probs import MODES

from slipstream_gateway.parsing.choice import MAX_TOOLS
from slipstream_gateway.settings import MAX_PROMPTS

Schema = Mapping[str, Any]

MAX_TOP = 20  # log probs beside a token's own
MAX_ID = 128  # characters of a request's id

FLAG: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
WORD: Schema = {"type": "string", "minLength": 1}
_NULL: Schema = {"type": "null"}


def whole(low: int, high: int = limits.INT32_MAX) -> Schema:
    """Return the schema of a whole number within bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def listed(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    """Return the schema of a list with so many items."""
    found: dict[str, Any] = {"type": "array", "items": items}
    if low:
        found["minItems"] = low
    return found if high is None else {**found, "maxItems": high}


def either(*schemas: Schema) -> Schema:
    """Return the schema of what one of several takes."""
    return {"anyOf": list(schemas)}


def keyed(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these properties, others beside them."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


TOKEN: Schema = whole(0)
IDS: Schema = listed(TOKEN, 0, limits.MAX_WORDS)
WORDS: Schema = either(WORD, listed(WORD, 0, limits.MAX_WORDS))
PROMPT: Schema = either(
    WORD,
    listed(WORD, 1, MAX_PROMPTS),
    listed(TOKEN, 1),
    listed(listed(TOKEN, 1), 1, MAX_PROMPTS),
)
TOP: Schema = whole(0, MAX_TOP)
BIAS: Schema = {
    "type": "object",
    "maxProperties": limits.MAX_BIASED_TOKENS,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {
        "type": "number",
        "minimum": -limits.VLLM_MAX_BIAS,
        "maximum": limits.VLLM_MAX_BIAS,
    },
}
MODE: Schema = {"enum": list(MODES)}
STREAM_OPTIONS: Schema = keyed(
    {name: either(FLAG, _NULL) for name in ("include_usage", "continuous_usage_stats")}
)

_MAYBE_TEXT: Schema = either(TEXT, _NULL)
_NAMED: Schema = keyed({"name": WORD}, "name")
_FUNCTION: Schema = {"enum": ["function"]}
_PART: Schema = either(
    TEXT,
    keyed({"type": {"enum": ["text", "input_text", "output_text"]}, "text": TEXT}, "type", "text"),
    keyed({"type": {"enum": ["refusal"]}, "refusal": TEXT}, "type", "refusal"),
)
_CALLED: Schema = keyed({"name": WORD, "arguments": either(TEXT, OBJECT, _NULL)}, "name")
_CALL: Schema = keyed({"type": _FUNCTION, "function": _CALLED}, "function")
_TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content", "thinking", "refusal")
_CONTENT: Schema = either(TEXT, listed(_PART))


def _message(roles: list[str], content: Schema, *required: str) -> Schema:
    return keyed(
        {
            "role": {"enum": roles},
            "content": content,
            "tool_calls": either(listed(_CALL), _NULL),
            "function_call": either(_CALLED, _NULL),
            **dict.fromkeys(_TEXTS, _MAYBE_TEXT),
            **{name: {"enum": [None, []]} for name in ("audio", "images", "videos")},
        },
        "role",
        *required,
    )


MESSAGE: Schema = either(
    _message(["system", "developer", "user", "tool", "function"], _CONTENT, "content"),
    _message(["assistant"], either(*_CONTENT["anyOf"], _NULL)),
)
TOOL: Schema = keyed(
    {
        "type": _FUNCTION,
        "function": keyed(
            {"name": WORD, "parameters": either(OBJECT, _NULL), "strict": either(FLAG, _NULL)},
            "name",
        ),
    },
    "function",
)
TOOLS: Schema = listed(TOOL, 0, MAX_TOOLS)
TOOL_CHOICE: Schema = either(
    {"enum": ["none", "auto", "required"]},
    keyed({"type": _FUNCTION, "function": _NAMED}, "type", "function"),
    keyed(
        {
            "type": {"enum": ["allowed_tools"]},
            "allowed_tools": keyed(
                {"mode": {"enum": ["auto", "required"]}, "tools": listed(OBJECT, 1)},
                "mode",
                "tools",
            ),
        },
        "type",
        "allowed_tools",
    ),
)
RESPONSE_FORMAT: Schema = either(
    keyed({"type": {"enum": ["text", "json_object"]}}, "type"),
    keyed(
        {"type": {"enum": ["json_schema"]}, "json_schema": keyed({"schema": OBJECT}, "schema")},
        "type",
        "json_schema",
    ),
    keyed({"type": {"enum": ["structural_tag"]}}, "type"),
)
CHOICE: Schema = listed(WORD, 1, MAX_CHOICES)
_GUIDES: Mapping[str, Schema] = {
    "json": either(WORD, OBJECT, FLAG),
    "regex": WORD,
    "choice": CHOICE,
    "grammar": WORD,
    "json_object": FLAG,
    "structural_tag": either(WORD, OBJECT),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), FLAG),
    **dict.fromkeys(("enable_in_reasoning", "disable_fallback"), FLAG),
    "whitespace_pattern": TEXT,
    "backend": {"enum": [""]},
    "_backend": {"enum": [""]},
}
STRUCTURED: Schema = either(
    TEXT,  # JSON of such an object
    {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: either(schema, _NULL) for name, schema in _GUIDES.items()},
    },
)
EARLY_STOPPING: Schema = {"enum": [True, False, 0, 1, "never"]}
TRUNCATED: Schema = either({"enum": [-1]}, whole(1))
CONTRACT: Mapping[str, Schema] = {
    "lora_name": {"type": "string"},
    "allowed_token_ids": listed(TOKEN, 1, limits.MAX_ALLOWED_IDS),
    "dry_sequence_breakers": listed(WORD, 0, limits.MAX_BREAKERS),
    "logits_processors": either({"type": "array", "maxItems": 0}, OBJECT),
    "guided_choice": CHOICE,
    "guided_decoding": STRUCTURED,
    "guided_grammar": TEXT,
    "guided_json": either(TEXT, OBJECT, FLAG),
    "guided_json_object": FLAG,
    "guided_regex": TEXT,
    "guided_whitespace_pattern": TEXT,
}
"""Names of the contract's that are no plain number or flag -> schema."""
