"""What the checks of both SDKs share: the server, a prompt, a tool and a schema."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic

Checks = dict[str, Callable[[], Any]]
PROMPT = "Write one sentence about the sea."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Target:
    """A server, and a model of it."""

    url: str
    model: str
    key: str
    has_tools: bool


class Answer(pydantic.BaseModel):
    """A form that an answer must have."""

    is_wet: bool
    depth: int = pydantic.Field(ge=0, le=99)


def expect(error: type[Exception], call: Callable[[], object], says: str) -> str:
    """Return the message of the error that a call must raise."""
    message = None
    try:
        call()
    except error as caught:
        message = str(caught)
    assert message is not None, f"no {error.__name__}"
    assert says in message, f"{message} does not say {says}"
    return message[:90]
