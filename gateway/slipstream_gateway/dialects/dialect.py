"""What a dialect is: how a body becomes a chat request, and how an answer becomes bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream_gateway.answer import Answer, Delta, Finish, TokenLogProb, Usage
from slipstream_gateway.errors import ApiError


class Writer(Protocol):
    """The bytes of one request's answer. Streamed: `start`, `write` and `finish`, then `end`.

    Events are whole: each call returns nothing or complete events, so that the caller may join
    them and send them at once. An HTTP response is either streamed or one `whole`.
    """

    def start(self, prompt_tokens: int) -> bytes:
        """Return the first events, before any token; `prompt_tokens`: of the whole prompt."""

    def write(
        self, index: int, deltas: Sequence[Delta], log_probs: Sequence[TokenLogProb]
    ) -> bytes:
        """Return events for what is new of answer `index`."""

    def finish(self, index: int, finish: Finish, usage: Usage) -> bytes:
        """Return the last events of answer `index`; `usage` is of the request so far."""

    def end(self, usage: Usage) -> bytes:
        """Return the last events of the response."""

    def fail(self, error: ApiError) -> bytes:
        """Return the events of an error in mid-stream, the last ones."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed."""


class Dialect(Protocol):
    """A schema over chat completions."""

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the chat completion that means the same. Raises ApiError.

        Every field is mapped, harmless and listed, or refused by name (`fields.py`).
        """

    def ignored(self, body: Mapping[str, Any]) -> list[str]:
        """Return what of a body `to_chat` took has no effect: header `x-slipstream-ignored`."""

    def writer(self, body: Mapping[str, Any], model: str) -> Writer:
        """Return a writer for the answer to a body; `model`: the name in the request."""

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error response."""
