"""Fields of a request to `/v1/responses`, and what happens to each."""

from typing import Annotated, Any, Literal

import msgspec

from slipstream_gateway.dialects.openai_fields import AS_IN_A_CHAT, EXTRAS
from slipstream_gateway.fields import Field, Table, Use

_STATELESS = "nothing is kept between requests; send the whole input each time"

LOG_PROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Detail = Literal["auto", "concise", "detailed"]


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """How much to reason. `effort` has an effect, the rest has none."""

    effort: Effort | None = None
    summary: Detail | None = None
    generate_summary: Detail | None = None
    context: str | None = None
    mode: str | None = None


class Format(msgspec.Struct, forbid_unknown_fields=True):
    """What the text of the answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Form of the text. `verbosity` has no effect."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


_MAPPED = (
    Field("model", "the model that answers", str, is_required=True),
    Field(
        "input",
        "text, or items: `message` (parts `input_text`, `output_text`, `refusal`), "
        "`function_call`, `function_call_output`, `reasoning`. Other items and parts: 400",
        str | Annotated[list[Any], msgspec.Meta(min_length=1)],
        is_required=True,
    ),
    Field("instructions", "the system message before the input", str),
    Field("max_output_tokens", "at most so many tokens, reasoning included", int),
    Field("temperature", AS_IN_A_CHAT, float),
    Field("top_p", AS_IN_A_CHAT, float),
    Field("top_k", AS_IN_A_CHAT, int),
    Field("stop", AS_IN_A_CHAT, str | list[str]),
    Field("stream", "events, as the answer is made", bool),
    Field(
        "reasoning",
        "`effort`: as `reasoning_effort`. `summary` has no effect: reasoning is sent whole, as "
        "`reasoning_text`",
        Reasoning,
    ),
    Field(
        "text",
        "`format`: text, json_object or json_schema. `verbosity` has no effect",
        TextConfig,
    ),
    Field(
        "tools",
        "functions. Tools of other types are skipped, and named in a header",
        list[dict[str, Any]],
    ),
    Field(
        "tool_choice",
        "none, auto, required, a function, or allowed_tools. A tool of another type: 400",
        str | dict[str, Any],
    ),
    Field("parallel_tool_calls", "false: at most one call an answer", bool),
    Field(
        "include",
        f"`{LOG_PROBS}`: log probs of all tokens of the answer. Others: no effect",
        list[Include],
    ),
    Field("top_logprobs", "so many likely tokens beside each; turns log probs on", int),
    Field("metadata", "returned as it came", dict[str, str]),
)
_HARMLESS = (
    ("prompt_cache_key", str, "every prompt is looked up in the prefix cache"),
    ("safety_identifier", str, "users are not told apart"),
    ("user", str, "users are not told apart"),
    ("client_metadata", dict[str, Any], "it describes the client"),
    ("store", bool, "answers are not stored; the response says `store: false`"),
    ("service_tier", str, "there is one tier, `default`"),
    ("max_tool_calls", int, "it limits built-in tools, and there are no built-in tools"),
    ("stream_options", dict[str, bool], "events are never obfuscated"),
    ("prompt_cache_retention", str, "the prefix cache keeps what it has room for"),
    ("prompt_cache_options", dict[str, Any], "the prefix cache keeps what it has room for"),
)
_REFUSED = (
    ("truncation", "a prompt is never cut", "disabled"),
    ("background", "an answer belongs to its connection", False),
    ("background_options", "an answer belongs to its connection"),
    ("previous_response_id", _STATELESS),
    ("conversation", _STATELESS),
    ("prompt", "no prompts are stored"),
    ("context_management", "contexts are not compacted"),
    ("moderation", "there is no moderation"),
    ("access_programs", "there are none"),
    ("image", "models read text only"),
)
TABLE = Table(
    (
        *_MAPPED,
        *(Field(name, why, kind, use=Use.HARMLESS) for name, kind, why in _HARMLESS),
        *(Field(name, why, use=Use.REFUSED, neutral=tuple(only)) for name, why, *only in _REFUSED),
        *EXTRAS.values(),
    )
)
# Fields of the chat completion, by which its errors name them, and what they are here.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "include",
}
