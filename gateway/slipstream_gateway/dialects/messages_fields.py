"""Fields of a request to `/v1/messages`, and what happens to each."""

from typing import Annotated, Any, Literal

import msgspec

from slipstream_gateway.dialects.openai_fields import AS_IN_A_CHAT, EXTRAS
from slipstream_gateway.fields import Field, Table, Use

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether to reason, with how many tokens, and whether to show it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that the text of the answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Whether, and which, tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A turn of the conversation: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


_COUNTED = (
    Field("model", "the model that answers", str, is_required=True),
    Field(
        "messages",
        "roles user, assistant and system; blocks `text`, `tool_use`, `tool_result`, `thinking`. "
        "Other blocks: 400",
        Annotated[list[Message], msgspec.Meta(min_length=1)],
        is_required=True,
    ),
    Field("system", "text, or text blocks, joined by line ends", str | list[dict[str, Any]]),
    Field(
        "tools",
        "tools with an `input_schema`. Those of Anthropic's own types are skipped, and named in a "
        "header",
        list[dict[str, Any]],
    ),
    Field("tool_choice", "auto, any, tool or none; `disable_parallel_tool_use`", ToolChoice),
    Field(
        "thinking",
        "template variable `enable_thinking`, false if absent. `budget_tokens`: at most so many "
        "tokens of reasoning. `display: omitted` leaves its text out",
        Thinking,
    ),
    Field(
        "output_config",
        "`effort`: as `reasoning_effort`. `format`: text that matches a schema",
        OutputConfig,
    ),
    Field("output_format", "as `output_config.format`", OutputFormat),
    EXTRAS["chat_template_kwargs"],
    *(
        Field(name, why, kind, use=Use.HARMLESS)
        for name, kind, why in (
            ("cache_control", dict[str, Any], "every prompt is looked up in the prefix cache"),
            ("context_management", dict[str, Any], "the client's messages are used as they are"),
            ("betas", list[str], "no feature needs to be turned on"),
            ("speed", str, "there is one speed"),
            ("user_profile_id", str, "users are not told apart"),
            ("workspace_id", str, "there is one workspace"),
        )
    ),
    Field(
        "mcp_servers", "no server is called on a client's behalf", use=Use.REFUSED, neutral=([],)
    ),
)
_ANSWERED = (
    Field("max_tokens", "at most so many tokens, reasoning included", Positive, is_required=True),
    Field("stream", "events, as the answer is made", bool),
    Field("stop_sequences", "texts that end the answer; the one found is returned", list[str]),
    Field("temperature", AS_IN_A_CHAT, float),
    Field("top_p", AS_IN_A_CHAT, float),
    Field("top_k", AS_IN_A_CHAT, int),
    *(
        Field(name, why, kind, use=Use.HARMLESS)
        for name, kind, why in (
            ("metadata", dict[str, Any], "users are not told apart"),
            ("service_tier", str, "there is one tier, `standard`"),
            ("inference_geo", str, "there is one server"),
            ("diagnostics", dict[str, Any], "caches are not diagnosed"),
        )
    ),
    *(
        Field(name, why, use=Use.REFUSED)
        for name, why in (
            ("container", "there are no containers"),
            ("compaction", "contexts are not compacted"),
            ("thread", "nothing is kept between requests"),
            ("fallbacks", "no other model answers instead"),
            ("fallback_credit_token", "no other model answers instead"),
            ("billing_policy", "nothing is billed"),
        )
    ),
    *(
        field
        for name, field in EXTRAS.items()
        if name not in ("logit_bias", "chat_template_kwargs")
    ),
)
COUNTED = Table(_COUNTED)
TABLE = Table((*_COUNTED, *_ANSWERED))
# Fields of the chat completion, by which its errors name them, and what they are here.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_token_budget": "thinking.budget_tokens",
}
