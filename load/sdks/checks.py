"""What the checks of all tools share: the server, prompts, a tool, a schema, forced answers."""

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic

Checks = dict[str, Callable[[], Any]]
PROMPT = "Write one sentence about the sea."
CODE = "import os\n\n\ndef main("
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
# Forms of an answer. A small model writes calls and reasoning only where a guide says so.
_CALL = (
    r'<tool_call>\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{2,8}"\}\}</tool_call>'
)
CALL = {"structured_outputs": {"regex": _CALL}}
CALLS = {"structured_outputs": {"regex": f"[a-z]{{3,9}}{_CALL}\\n{_CALL}"}}
THINK = {"structured_outputs": {"regex": r"<think>[a-z ]{3,20}</think>[a-z]{3,9}"}}
IDLE_S = 20.0


@dataclass(frozen=True)
class Target:
    """A server, and a model of it.

    Attributes:
        url: of the gateway, without `/v1`.
        has_tools: the model calls tools when it must.
        plain: URL of a gateway for which the model has no reasoning, for calls that must come.
        triton: URL of Triton's HTTP endpoint, for tools that speak to it; empty: there is none.
        checkpoint: the folder of the model's checkpoint.
    """

    url: str
    model: str
    key: str
    has_tools: bool
    plain: str = ""
    triton: str = ""
    checkpoint: str = ""

    @property
    def base(self) -> str:
        """Return the base URL of OpenAI's SDKs."""
        return f"{self.url}/v1"

    @property
    def plain_base(self) -> str:
        """Return the same of the gateway without reasoning."""
        return f"{self.plain}/v1"

    def get(self, path: str) -> bytes:
        """Return the body of a response to GET."""
        headers = {"authorization": f"Bearer {self.key}"}
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=headers)
        ) as got:
            return bytes(got.read())

    def wait_idle(self) -> None:
        """Wait until the server has no request in flight. Raises AssertionError after a while."""
        start_s = time.monotonic()
        while load := json.loads(self.get("/load"))["server_load"]:
            assert time.monotonic() - start_s < IDLE_S, f"{load} requests are in flight still"
            time.sleep(0.05)


class Answer(pydantic.BaseModel):
    """A form that an answer must have."""

    is_wet: bool
    depth: int = pydantic.Field(ge=0, le=99)


def check_call(name: str | None, arguments: Any) -> None:
    """Raise AssertionError unless a call is one of `get_weather` with a city."""
    assert name == "get_weather", name
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert list(found) == ["city"], found
    assert found["city"], found


def raised(error: type[Exception], call: Callable[[], object]) -> Exception:
    """Return the error that a call must raise."""
    try:
        call()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__}")


def expect(error: type[Exception], call: Callable[[], object], says: str) -> str:
    """Return the message of the error that a call must raise."""
    message = str(raised(error, call))
    assert says in message, f"{message} does not say {says}"
    return message[:90]
