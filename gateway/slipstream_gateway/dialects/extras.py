"""Fields of a chat completion that the other dialects take under the same name."""

from typing import Any

from slipstream_gateway.dialects.fields import Mapped

_NAMES = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "thinking_token_budget",
)
_TYPES = {"chat_template_kwargs": dict[str, Any]}
EXTRAS = {name: Mapped(_TYPES.get(name, Any), "As in a chat completion") for name in _NAMES}
