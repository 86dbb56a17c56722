"""One fuzzed request on its way, and what came of it."""

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from fuzz_cases import Case
from slipstream_serve.triton import Endpoints
from tritonclient.grpc import service_pb2 as messages

TIMEOUT_S = 60.0
NO_END = "no end within"
_DEAD_STUB = re.compile(r"Stub process '\w+' is not healthy")
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class Outcome:
    """Either an error, or responses by output name; `is_whole`: their end was told."""

    error: str = ""
    status: str = ""  # of HTTP, its number; of gRPC, its name
    responses: list[dict[str, Any]] = field(default_factory=list)
    is_whole: bool = False
    is_lost: bool = False  # no connection, or no process behind it: the server may be gone


class Sender:
    """One server's gRPC and HTTP. As an asynchronous context."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def __aenter__(self) -> "Sender":
        self._channel = grpc.aio.insecure_channel(self._endpoints.grpc, options=_OPTIONS)
        self._stream = self._channel.stream_stream(
            _METHOD,
            request_serializer=None,  # bytes: some are no message
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        await self._channel.close()

    async def send(self, case: Case) -> Outcome:
        """Ask, and read to the end."""
        ask = self._ask_grpc if case.wire == "grpc" else self._ask_http
        outcome = Outcome()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await ask(case, outcome)
        except TimeoutError:
            outcome.error, outcome.is_whole = f"{NO_END} {TIMEOUT_S:g} s", False
        outcome.is_lost |= _DEAD_STUB.search(outcome.error) is not None
        return outcome

    async def _ask_grpc(self, case: Case, outcome: Outcome) -> None:
        call = self._stream(iter([case.mutated(message(case).SerializeToString())]))
        try:
            async for reply in call:
                if reply.error_message:
                    outcome.error, outcome.is_whole = reply.error_message, True
                    continue
                response = reply.infer_response
                found = {
                    output.name: (list(output.shape), raw)
                    for output, raw in zip(
                        response.outputs, response.raw_output_contents, strict=True
                    )
                }
                if found:
                    outcome.responses.append(found)
                outcome.is_whole |= response.parameters["triton_final_response"].bool_param
            outcome.status = (await call.code()).name
        except grpc.RpcError as error:
            outcome.status = error.code().name
            outcome.error, outcome.is_whole = str(error.details()), True
            outcome.is_lost = error.code() is grpc.StatusCode.UNAVAILABLE

    async def _ask_http(self, case: Case, outcome: Outcome) -> None:
        verb = "generate_stream" if is_stream(case) else "generate"
        url = f"{self._endpoints.http}/v2/models/{case.model}/{verb}"
        try:
            async with self._http.post(url, data=case.body()) as reply:
                outcome.status = str(reply.status)
                text = (await reply.read()).decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            outcome.error, outcome.is_lost = repr(error), True
            return
        outcome.is_whole = True
        for line in text.split("\n") if is_stream(case) else [text]:
            if not line:
                continue
            try:
                answer = json.loads(line.removeprefix("data: "))
            except ValueError:
                answer = {"error": f"not JSON: {line}"}
            if "error" in answer:
                outcome.error = answer["error"]
            else:
                outcome.responses.append(answer)


def is_stream(case: Case) -> bool:
    """Whether it can have several responses."""
    return case.is_streaming or case.size > 1 or case.num_sequences > 1


def message(case: Case) -> messages.ModelInferRequest:
    """A case as gRPC has it."""
    request = messages.ModelInferRequest(model_name=case.model, id=case.request_id)
    for tensor in case.tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    for name in case.outputs:
        request.outputs.add(name=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in case.parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param"}
        setattr(request.parameters[name], kinds.get(type(value), "string_param"), value)
    return request
