"""Send a streamed request over gRPC or HTTP: bytes in, arrival times and token counts out.

Both parse as little of a response as possible: building the SDK's chunks, with an array for each
tensor, costs several times as much processor time as the transport.
"""

import asyncio
import os
import re
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import aiohttp
import grpc
import grpc.aio
import msgspec
from slipstream_contract import whole
from slipstream_contract.errors import Code
from tritonclient.grpc import service_pb2

from slipstream_client.aio import is_task_cancelled, wait_for_end
from slipstream_client.bench.messages import Record
from slipstream_client.client import CHANNEL_OPTIONS
from slipstream_client.failures import (
    RequestTimeoutError,
    error_from_rpc,
    no_server,
    other_server,
    unknown_model,
)

STREAMS_PER_CHANNEL = 64  # more streams on one HTTP/2 connection delay each other
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
# gRPC itself writes `UNAVAILABLE: ipv4:...` when a connection broke.
_CODED = re.compile(rf"(?:^|[\s,;:'\"\]])({'|'.join(Code)}): (?!ipv[46]:|unix:)")
_RETRY_AFTER = re.compile(r"retry_after_ms: (\d+)")
_QUEUE_FULL = "Exceeds maximum queue size"  # Triton's own words
_LATE = "no complete answer in time"
_BROKEN = "the connection ended with the request"
_MAX_MESSAGE = 300  # characters
MAX_LINE_BYTES = 1 << 24  # length of an event


class Transport(Protocol):
    """A way to a server's model. `send` never raises for what the server or network does."""

    async def send(self, payload: bytes, record: Record) -> None:
        """Send a request once; fill in its record."""

    async def close(self) -> None:
        """Close the connections."""


def fail(record: Record, text: str, status: str) -> None:
    """Record an error: the contract's code if the text has one, else the status."""
    if unknown := unknown_model(text):
        text, status = unknown.message, unknown.code
    found = _CODED.search(text)
    record.code = found[1] if found else status
    record.message = text.strip()[:_MAX_MESSAGE]
    is_ours = found is not None and found[1] == Code.UNAVAILABLE
    record.is_refused = not record.times_ns and (is_ours or _QUEUE_FULL in text)


def retry_after_s(message: str) -> float | None:
    """Return the pause that a refusal names, in seconds; None if it names none."""
    found = _RETRY_AFTER.search(message)
    return int(found[1]) / 1e3 if found else None


# --- gRPC ----------------------------------------------------------------------------------------


class GrpcTransport:
    """gRPC: one stream per request, at most `STREAMS_PER_CHANNEL` streams per connection."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channels: list[tuple[grpc.aio.Channel, Any]] = []
        self._num_streams: list[int] = []

    async def send(self, payload: bytes, record: Record) -> None:
        """Send a request once; fill in its record."""
        number = self._channel()
        self._num_streams[number] += 1
        call = self._channels[number][1](iter([payload]), timeout=self._timeout_s)
        times, counts = array("q"), array("i")
        error = ""
        try:
            async for data in call:
                now_ns = time.monotonic_ns()
                count, num_input, error = parse_response(data)
                if error:
                    break
                if count:
                    times.append(now_ns)
                    counts.append(count)
                if num_input >= 0:
                    record.num_input_tokens = num_input
        except grpc.RpcError as failure:
            self._note(record, times, counts)
            is_late = record.ended_ns - record.sent_ns >= self._timeout_s * 1e9
            translated = error_from_rpc(failure, self._address, is_late)
            said = failure.details() or ""
            if isinstance(translated, RequestTimeoutError):
                fail(record, _LATE, "DEADLINE_EXCEEDED")
            else:
                words = said if _CODED.search(said) else translated.message
                fail(record, words, failure.code().name)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            self._note(record, times, counts)
            is_late = record.ended_ns - record.sent_ns >= self._timeout_s * 1e9
            lost = (_LATE, "DEADLINE_EXCEEDED") if is_late else (_BROKEN, "UNAVAILABLE")
            fail(record, *lost)
        else:
            self._note(record, times, counts)
            if error:
                fail(record, error, "ERROR")
        finally:
            if error:
                await wait_for_end(call)
            self._num_streams[number] -= 1
            call.cancel()

    async def close(self) -> None:
        """Close the connections."""
        for channel, _ in self._channels:
            await channel.close()

    def _note(self, record: Record, times: "array[int]", counts: "array[int]") -> None:
        record.ended_ns = time.monotonic_ns()
        record.times_ns, record.counts = times.tobytes(), counts.tobytes()

    def _channel(self) -> int:
        """Return the index of a connection with room; opens one if there is none."""
        for number, streams in enumerate(self._num_streams):
            if streams < STREAMS_PER_CHANNEL:
                return number
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        channel = grpc.aio.insecure_channel(self._address, options=options)
        self._channels.append((channel, channel.stream_stream(_METHOD, None, None)))
        self._num_streams.append(0)
        return len(self._num_streams) - 1


def parse_response(data: bytes) -> tuple[int, int, str]:
    """Parse a `ModelStreamInferResponse`: output tokens, prompt tokens (-1: unknown), error."""
    message = service_pb2.ModelStreamInferResponse.FromString(data)
    if message.error_message:
        return 0, -1, message.error_message
    count, num_input = 0, -1
    response = message.infer_response
    for number, output in enumerate(response.outputs):
        if output.name == "num_output_tokens":
            count = int.from_bytes(response.raw_output_contents[number][:4], "little")
        elif output.name == "num_input_tokens":
            num_input = int.from_bytes(response.raw_output_contents[number][:4], "little")
    return count, num_input, ""


# --- HTTP ----------------------------------------------------------------------------------------


class Event(NamedTuple):
    """What figures need of an event of an answer."""

    num_output: int = 0  # tokens that it brings
    num_input: int = -1  # tokens of the prompt; -1: it does not say
    error: str = ""
    is_last: bool = False


class _Fields(msgspec.Struct):
    """The fields of a `generate_stream` event that figures need."""

    num_output_tokens: int | list[int] = 0
    num_input_tokens: int | list[int] = -1
    error: str = ""
    last_token_time_ns: int | list[int] | None = None
    finish_reason: str = whole.RUNNING


_fields = msgspec.json.Decoder(_Fields)


def _event(line: bytes) -> Event:
    fields = _fields.decode(line.removeprefix(b"data: "))
    is_last = whole.has_ended(fields.last_token_time_ns, fields.finish_reason)
    count, num_input = _one(fields.num_output_tokens), _one(fields.num_input_tokens)
    return Event(count, num_input, fields.error, is_last)


def _one(value: int | list[int]) -> int:
    return value if isinstance(value, int) else sum(value)


class HttpTransport:
    """HTTP `generate_stream`: one connection per request in flight, kept alive."""

    _NAME = "HTTP"

    def __init__(
        self,
        address: str,
        path: str,
        timeout_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._address = address
        self._url = f"http://{address}{path}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Content-Type": "application/json"} | dict(headers)
        self._session: aiohttp.ClientSession | None = None

    async def send(self, payload: bytes, record: Record) -> None:
        """Send a request once; fill in its record."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        times, counts = array("q"), array("i")
        error, status, is_whole = "", "ERROR", False
        try:
            async with self._session.post(
                self._url, data=payload, headers=self._headers, read_bufsize=MAX_LINE_BYTES
            ) as reply:
                status = f"HTTP_{reply.status}"
                async for now_ns, event in self._events(reply):
                    error = error or event.error
                    is_whole = is_whole or event.is_last
                    if event.num_output and not error:
                        times.append(now_ns)
                        counts.append(event.num_output)
                    if event.num_input >= 0:
                        record.num_input_tokens = event.num_input
            if status == "HTTP_200" and not (error or is_whole):
                error, status = whole.CUT, "UNAVAILABLE"
        except TimeoutError:
            error, status = _LATE, "DEADLINE_EXCEEDED"
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError) as failure:
            error, status = _broken(failure, self._address, status, self._NAME)
        record.ended_ns = time.monotonic_ns()
        record.times_ns, record.counts = times.tobytes(), counts.tobytes()
        if error or status != "HTTP_200":
            fail(record, error, status)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _events(self, reply: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, Event]]:
        """Yield each event with its arrival time, and the JSON object that a refusal sends."""
        async for now_ns, line in lines_of(reply):
            if line:
                yield now_ns, _event(line)


async def lines_of(reply: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, bytes]]:
    """Yield each line with its arrival time; what has no end comes at last."""
    rest = b""
    async for data in reply.content.iter_any():
        now_ns = time.monotonic_ns()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield now_ns, line
    if rest.strip():
        yield time.monotonic_ns(), rest


def _broken(failure: Exception, address: str, status: str, name: str) -> tuple[str, str]:
    """Return message and status of a request that `failure` ended.

    `status` is HTTP's, if any; `name` is the protocol's.
    """
    if status == "HTTP_200":  # the answer had begun
        is_gone = isinstance(failure, OSError)
        return f"{type(failure).__name__}: {failure}", "UNAVAILABLE" if is_gone else status
    if isinstance(failure, aiohttp.ServerDisconnectedError):
        error = no_server(address, "Server disconnected", name)
    elif isinstance(failure, OSError):
        cause = failure.os_error if isinstance(failure, aiohttp.ClientConnectorError) else failure
        number = cause.errno or 0  # of the resolver: below 0, and its words are its own
        reason = os.strerror(number) if number > 0 else cause.strerror or str(cause)
        error = no_server(address, reason, name)
    else:
        found = f" ({status})" if status.startswith("HTTP_") else ""
        error = other_server(address, name, found)
    return error.message, error.code
