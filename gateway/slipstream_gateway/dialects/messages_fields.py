"""Fields of a request to `/v1/messages`, and what happens to each."""

from typing import Annotated, Any, Literal

import msgspec

from slipstream_gateway.dialects.extras import EXTRAS
from slipstream_gateway.dialects.fields import Harmless, Mapped, Refused, Table

_CACHE = "every prompt is looked up in the prefix cache"
_ONE = "there is one server"
_EXTRAS = {name: field for name, field in EXTRAS.items() if name != "logit_bias"}

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


COUNTED: Table = {
    "model": Mapped(str, "The model that answers", required=True),
    "messages": Mapped(
        list[Message],
        "Roles user, assistant and system; blocks `text`, `tool_use`, `tool_result`, `thinking`. "
        "Other blocks: 400",
        required=True,
    ),
    "system": Mapped(str | list[dict[str, Any]], "Text, or text blocks, joined by line ends"),
    "tools": Mapped(
        list[dict[str, Any]],
        "Tools with an `input_schema`. Those of Anthropic's own types are skipped, and named in a "
        "header",
    ),
    "tool_choice": Mapped(ToolChoice, "auto, any, tool or none; `disable_parallel_tool_use`"),
    "thinking": Mapped(
        Thinking,
        "Template variable `enable_thinking`, false if absent. `budget_tokens`: at most so many "
        "tokens of reasoning. `display: omitted` leaves its text out",
    ),
    "output_config": Mapped(
        OutputConfig, "`effort`: as `reasoning_effort`. `format`: text that matches a schema"
    ),
    "output_format": Mapped(OutputFormat, "As `output_config.format`"),
    "chat_template_kwargs": EXTRAS["chat_template_kwargs"],
    "cache_control": Harmless(dict[str, Any], _CACHE),
    "context_management": Harmless(dict[str, Any], "the client's messages are used as they are"),
    "betas": Harmless(list[str], "no feature needs to be turned on"),
    "speed": Harmless(str, "there is one speed"),
    "user_profile_id": Harmless(str, "users are not told apart"),
    "workspace_id": Harmless(str, "there is one workspace"),
    "mcp_servers": Harmless(list[Any], "no server is called on a client's behalf", values=([],)),
}
TABLE: Table = {
    **COUNTED,
    "max_tokens": Mapped(Positive, "At most so many tokens, reasoning included", required=True),
    "stream": Mapped(bool, "Events, as the answer is made"),
    "stop_sequences": Mapped(list[str], "Texts that end the answer; the one found is returned"),
    "temperature": Mapped(float, "As in a chat completion"),
    "top_p": Mapped(float, "As in a chat completion"),
    "top_k": Mapped(int, "As in a chat completion"),
    "metadata": Harmless(dict[str, Any], "users are not told apart"),
    "service_tier": Harmless(str, "there is one tier, `standard`"),
    "inference_geo": Harmless(str, _ONE),
    "diagnostics": Harmless(dict[str, Any], "caches are not diagnosed"),
    "container": Refused("there are no containers"),
    "compaction": Refused("contexts are not compacted"),
    "thread": Refused("nothing is kept between requests"),
    "fallbacks": Refused("no other model answers instead"),
    "fallback_credit_token": Refused("no other model answers instead"),
    "billing_policy": Refused("nothing is billed"),
    **_EXTRAS,
}
# Fields of the chat completion, by which its errors name them, and what they are here.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_token_budget": "thinking.budget_tokens",
}
