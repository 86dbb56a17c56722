"""The asynchronous client: `client.py` with `async for` and `await`."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from math import inf
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.client import CHANNEL_OPTIONS, DEFAULT_MODEL, DEFAULT_URL, ENDS_S
from slipstream_client.codec import (
    chunks_of,
    health_model_of,
    health_of,
    health_request,
    request_of,
)
from slipstream_client.failures import error_from_rpc, error_from_sending, error_from_text
from slipstream_client.results import Chunk, Completion, join


def is_task_cancelled() -> bool:
    """Return whether this task is being cancelled.

    If not, a CancelledError comes from grpc.aio: it cancels a call that ends, by its deadline or
    with its connection, while the request is still being written.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_for_end(call: Any) -> None:
    """Wait until a stream that reported an error ends; cancel it after `ENDS_S` seconds."""
    try:
        await asyncio.wait([asyncio.ensure_future(call.code())], timeout=ENDS_S)
    finally:
        call.cancel()  # harmless when it has ended


class AsyncChunkStream(AsyncIterator[Chunk]):
    """The chunks of one request. Leaving the iteration early cancels the request on the server: by
    `cancel()`, the end of an `async with` block, a cancelled task, or deletion after a `break`.
    """

    def __init__(self, call: Any, url: str, request_id: str, deadline_s: float) -> None:
        self.request_id = request_id
        self._call = call
        self._deadline_s = deadline_s  # time.monotonic()
        self._url = url
        self._is_over = False
        self._waiting: deque[Chunk] = deque()  # the rest of a response with several sequences

    async def __anext__(self) -> Chunk:
        """Return the next chunk. Raises ContractError, or RequestTimeoutError (a TimeoutError)."""
        if self._is_over:
            raise StopAsyncIteration
        if self._waiting:
            return self._waiting.popleft()
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            was_cancelled_here = self._is_over
            self.cancel()
            if was_cancelled_here:  # by cancel(), in another task: the end, not an error
                raise StopAsyncIteration from None
            if not is_task_cancelled():
                is_late = time.monotonic() >= self._deadline_s
                raise error_from_sending(self._url, is_late) from None
            raise
        except grpc.RpcError as error:
            if self._is_over:  # by cancel(), as above
                raise StopAsyncIteration from None
            self._is_over = True
            is_late = time.monotonic() >= self._deadline_s
            raise error_from_rpc(error, self._url, is_late) from None
        if response is grpc.aio.EOF:
            self._is_over = True
            raise StopAsyncIteration
        if response.error_message:
            self._is_over = True
            await wait_for_end(self._call)
            raise error_from_text(response.error_message)
        self._waiting.extend(chunks_of(response.infer_response))
        return self._waiting.popleft()

    def cancel(self) -> None:
        """Stop the generation on the server and end the iteration. Harmless after the end."""
        self._is_over = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not self._is_over:
            self.cancel()


class AsyncSlipstreamClient:
    """A client of a server's models over gRPC, for one event loop; works in an `async with` block.

    Models and parameters are those of `SlipstreamClient`.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        model: str = DEFAULT_MODEL,
        timeout_s: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        self._credentials = credentials
        self._channel: Any = None  # belongs to the loop of the first request

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: object,
    ) -> AsyncChunkStream:
        """Generate; chunks arrive as they are made. Raises ContractError for a wrong parameter."""
        return self._start(prompt, model, request_id, timeout_s, parameters)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: object,
    ) -> Completion:
        """Generate and wait for the end. Raises ContractError or RequestTimeoutError."""
        stream = self._start(prompt, model, request_id, timeout_s, parameters)
        async with stream as chunks:
            return join([chunk async for chunk in chunks])

    async def health(self, timeout_s: float = 5.0, model: str | None = None) -> dict[str, Any]:
        """Return the engine's state, as `SlipstreamClient.health`."""
        request = health_request(health_model_of(model or self.model))
        try:
            response = await self._stub().ModelInfer(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.url) from None
        return health_of(response)

    async def is_ready(self, model: str | None = None, timeout_s: float = 5.0) -> bool:
        """Return whether the server reports the model as loaded; False if no server answers."""
        request = service_pb2.ModelReadyRequest(name=model or self.model)
        try:
            return bool((await self._stub().ModelReady(request, timeout=timeout_s)).ready)
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Close the connection and cancel the requests that still run on it."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = (
                grpc.aio.secure_channel(self.url, self._credentials, options=CHANNEL_OPTIONS)
                if self._credentials
                else grpc.aio.insecure_channel(self.url, options=CHANNEL_OPTIONS)
            )
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _start(
        self,
        prompt: str | Sequence[int],
        model: str | None,
        request_id: str | None,
        timeout_s: float | None,
        parameters: Mapping[str, object],
    ) -> AsyncChunkStream:
        request_id = request_id or uuid.uuid4().hex
        request = request_of(model or self.model, prompt, parameters, request_id)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = inf if timeout_s is None else time.monotonic() + timeout_s
        call = self._stub().ModelStreamInfer(iter([request]), timeout=timeout_s)
        return AsyncChunkStream(call, self.url, request_id, deadline_s)
