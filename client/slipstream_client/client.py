"""The synchronous client: one gRPC stream per request, so that each can be cancelled alone."""

import threading
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.codec import (
    ENSEMBLE,
    chunks_of,
    health_model_of,
    health_of,
    health_request,
    request_of,
)
from slipstream_client.failures import error_from_rpc, error_from_text
from slipstream_client.interrupts import interruptible
from slipstream_client.results import Chunk, Completion, join

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_MODEL = ENSEMBLE
CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

ENDS_S = 3.0
"""Seconds to wait for the end of a stream after its error, which is its last response.

Triton ends the stream then; closing it from this side before that leaks memory in the server.
"""


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request. Leaving the iteration early cancels the request on the server: by
    `cancel()`, the end of a `with` block, or `break` out of a `for` with the only reference.
    """

    def __init__(self, call: Any, url: str, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._url = url
        self._is_over = False
        self._waiting: deque[Chunk] = deque()  # the rest of a response with several sequences

    def __next__(self) -> Chunk:
        """Return the next chunk. Raises ContractError, or RequestTimeoutError (a TimeoutError)."""
        if self._is_over:
            raise StopIteration
        if self._waiting:
            return self._waiting.popleft()
        try:
            with interruptible(self.cancel):
                response = self._read()
        except StopIteration:
            self._is_over = True
            raise
        except grpc.RpcError as error:
            if self._is_over:  # cancel() in another thread: the end, not an error
                raise StopIteration from None
            self._is_over = True
            raise error_from_rpc(error, self._url) from None
        except BaseException:  # Ctrl-C while waiting
            self.cancel()
            raise
        if response.error_message:
            raise error_from_text(response.error_message)
        self._waiting.extend(chunks_of(response.infer_response))
        return self._waiting.popleft()

    def cancel(self) -> None:
        """Stop the generation on the server and end the iteration. Harmless after the end."""
        self._is_over = True
        with interruptible():
            self._call.cancel()

    def _read(self) -> Any:
        """Wait for the next response; after an error, which is the last one, for the end, too."""
        response = next(self._call)
        if response.error_message:
            self._is_over = True
            ended = threading.Event()
            if self._call.add_callback(ended.set) and not ended.wait(ENDS_S):
                self._call.cancel()
        return response

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not self._is_over:
            self.cancel()


class SlipstreamClient:
    """A client of a server's models over gRPC. Thread-safe; works in a `with` block.

    `model` is `ensemble` (the default), `tensorrt_llm_bls` or `vllm_model` for text, `tensorrt_llm`
    for token ids, or `llmapi_model` where the repository has it. A deployment with a name has
    `NAME`, `NAME_vllm_model` and so on. A request's parameters are the inputs of that model, by the
    contract's names (`max_tokens`, `temperature`, `stop_words`, ...); `vllm_model` and
    `llmapi_model` take vLLM's sampling parameters.
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
        self._channel = (
            grpc.secure_channel(url, credentials, options=CHANNEL_OPTIONS)
            if credentials
            else grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: object,
    ) -> ChunkStream:
        """Generate; chunks arrive as they are made. Raises ContractError for a wrong parameter."""
        return self._start(prompt, model, request_id, timeout_s, parameters)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: object,
    ) -> Completion:
        """Generate and wait for the end. Raises ContractError or RequestTimeoutError."""
        with self._start(prompt, model, request_id, timeout_s, parameters) as chunks:
            return join(chunks)

    def health(self, timeout_s: float = 5.0, model: str | None = None) -> dict[str, Any]:
        """Return the engine's state: model, engine_pid, kv_blocks_free, ... (see the docs).

        The engine is that of `model`. Raises ContractError if no server or no engine answers.
        """
        request = health_request(health_model_of(model or self.model))
        try:
            response = _ask(self._stub.ModelInfer, request, timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.url) from None
        return health_of(response)

    def is_ready(self, model: str | None = None, timeout_s: float = 5.0) -> bool:
        """Return whether the server reports the model as loaded; False if no server answers.

        A loaded model need not be able to generate: check `health` and complete a token for that.
        """
        request = service_pb2.ModelReadyRequest(name=model or self.model)
        try:
            return bool(_ask(self._stub.ModelReady, request, timeout_s).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Close the connection and cancel the requests that still run on it."""
        with interruptible():
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self,
        prompt: str | Sequence[int],
        model: str | None,
        request_id: str | None,
        timeout_s: float | None,
        parameters: Mapping[str, object],
    ) -> ChunkStream:
        request_id = request_id or uuid.uuid4().hex
        request = request_of(model or self.model, prompt, parameters, request_id)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        # Never send the header `triton_grpc_error`: with it, quick errors crash Triton 24.10.
        with interruptible():
            call = self._stub.ModelStreamInfer(iter([request]), timeout=limit_s)
            return ChunkStream(call, self.url, request_id)


def _ask(method: Any, request: Any, timeout_s: float) -> Any:
    """Call a method with one response. Raises grpc.RpcError."""
    with interruptible():
        call = method.future(request, timeout=timeout_s)
    with interruptible(call.cancel):
        return call.result()
