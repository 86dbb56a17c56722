"""Send a request for a streamed completion to a server with OpenAI's protocol.

Tokens are counted by `usage`: in each event, where a server sends it there
(`continuous_usage_stats`). Elsewhere each event with text counts as one token, and the last event
brings what the sum lacks.
"""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from slipstream_contract.errors import Code

from slipstream_client.bench.openai import NAME, authorization
from slipstream_client.bench.transports import Event, HttpTransport, lines_of
from slipstream_client.failures import HTTP_CODES, words_of

_PATH = "/v1/completions"
_DONE = b"[DONE]"
_BUSY = (429, 503, "rate_limit_error")  # codes and types of an error that is over soon


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = -1
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunks = msgspec.json.Decoder(_Chunk)


class Answer:
    """Reads the events of one answer, and counts the tokens that they bring."""

    def __init__(self) -> None:
        self._num_counted = 0

    def event(self, line: bytes) -> Event:
        """Read a line of server-sent events; what is no data brings nothing."""
        if not line.startswith(b"data:"):
            return Event()
        data = line[5:].strip()
        if data == _DONE:
            return Event(is_last=True)
        chunk = _chunks.decode(data)
        if chunk.error is not None:
            return Event(error=f"{_code(chunk.error)}: {words_of(data) or 'no words'}")
        if chunk.usage is None:
            count, num_input = int(any(choice.text for choice in chunk.choices)), -1
        else:
            count = max(0, chunk.usage.completion_tokens - self._num_counted)
            num_input = chunk.usage.prompt_tokens
        self._num_counted += count
        return Event(count, num_input)


class OpenAITransport(HttpTransport):
    """OpenAI's `/v1/completions`: one connection per request in flight, kept alive."""

    _NAME = NAME

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, _PATH, timeout_s, authorization())

    async def _events(self, reply: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, Event]]:
        """Yield each event with its arrival time; of a refusal its words, as the contract has them.

        Raises ValueError for a refusal that has none.
        """
        answer = Answer()
        if reply.status != 200:
            said = words_of(await reply.read())
            if not said:
                raise ValueError("no error of OpenAI's form")
            yield 0, Event(error=_refusal(reply, said))
            return
        async for now_ns, line in lines_of(reply):
            yield now_ns, answer.event(line)


def _code(error: Any) -> Code:
    """Return the contract's code of an error that an event has."""
    kinds = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    is_busy = any(kind in _BUSY for kind in kinds)
    return Code.UNAVAILABLE if is_busy else Code.INTERNAL


def _refusal(reply: aiohttp.ClientResponse, said: str) -> str:
    code = HTTP_CODES.get(reply.status)
    if code is None:
        return said
    after_ms = reply.headers.get("retry-after-ms", "")
    if not after_ms.isdecimal():
        after_s = reply.headers.get("retry-after", "")
        after_ms = f"{after_s}000" if after_s.isdecimal() else ""
    return f"{code}: {said}" + (f" (retry_after_ms: {after_ms})" if after_ms else "")
