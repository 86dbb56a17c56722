"""Fields of a request to `/v1/responses`, and what happens to each."""

from typing import Any, Literal

import msgspec

from slipstream_gateway.dialects.extras import EXTRAS
from slipstream_gateway.dialects.fields import Harmless, Mapped, Refused, Table

_STATELESS = "nothing is kept between requests; send the whole input each time"
_NO_BUILT_IN = "there are no built-in tools"

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


TABLE: Table = {
    "model": Mapped(str, "The model that answers", required=True),
    "input": Mapped(
        str | list[Any],
        "Text, or items: `message` (parts `input_text`, `output_text`, `refusal`), "
        "`function_call`, `function_call_output`, `reasoning`. Other items and parts: 400",
        required=True,
    ),
    "instructions": Mapped(str, "The system message before the input"),
    "max_output_tokens": Mapped(int, "At most so many tokens, reasoning included"),
    "temperature": Mapped(float, "As in a chat completion"),
    "top_p": Mapped(float, "As in a chat completion"),
    "top_k": Mapped(int, "As in a chat completion"),
    "stop": Mapped(str | list[str], "As in a chat completion"),
    "stream": Mapped(bool, "Events, as the answer is made"),
    "reasoning": Mapped(
        Reasoning,
        "`effort`: as `reasoning_effort`. `summary` has no effect: reasoning is sent whole, as "
        "`reasoning_text`",
    ),
    "text": Mapped(
        TextConfig, "`format`: text, json_object or json_schema. `verbosity` has no effect"
    ),
    "tools": Mapped(
        list[dict[str, Any]], "Functions. Tools of other types are skipped, and named in a header"
    ),
    "tool_choice": Mapped(
        str | dict[str, Any],
        "none, auto, required, a function, or allowed_tools. A tool of another type: 400",
    ),
    "parallel_tool_calls": Mapped(bool, "false: at most one call an answer"),
    "include": Mapped(
        list[Include], f"`{LOG_PROBS}`: log probs of all tokens of the answer. Others: no effect"
    ),
    "top_logprobs": Mapped(int, "So many likely tokens beside each; turns log probs on"),
    "metadata": Mapped(dict[str, str], "Returned as it came"),
    "prompt_cache_key": Harmless(str, "every prompt is looked up in the prefix cache"),
    "safety_identifier": Harmless(str, "users are not told apart"),
    "user": Harmless(str, "users are not told apart"),
    "client_metadata": Harmless(dict[str, Any], "it describes the client"),
    "store": Harmless(bool, "answers are not stored; the response says `store: false`"),
    "service_tier": Harmless(str, "there is one tier, `default`"),
    "max_tool_calls": Harmless(int, f"it limits built-in tools, and {_NO_BUILT_IN}"),
    "stream_options": Harmless(dict[str, bool], "events are never obfuscated"),
    "prompt_cache_retention": Harmless(str, "the prefix cache keeps what it has room for"),
    "prompt_cache_options": Harmless(dict[str, Any], "the prefix cache keeps what it has room for"),
    "truncation": Harmless(str, "a prompt is never cut", values=("disabled",)),
    "background": Harmless(bool, "an answer belongs to its connection", values=(False,)),
    "background_options": Refused("an answer belongs to its connection"),
    "previous_response_id": Refused(_STATELESS),
    "conversation": Refused(_STATELESS),
    "prompt": Refused("no prompts are stored"),
    "context_management": Refused("contexts are not compacted"),
    "moderation": Refused("there is no moderation"),
    "access_programs": Refused("there are none"),
    "image": Refused("models read text only"),
    **EXTRAS,
}
# Fields of the chat completion, by which its errors name them, and what they are here.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "include",
}
