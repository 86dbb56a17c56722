"""A gRPC server that speaks Triton's protocol and plays one text model: what it is asked, it does.

Real gRPC on a real port: streams, deadlines, cancels and statuses are those of the library.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

HEALTH = {"model": "toy", "engine_pid": 7, "kv_blocks_free": 3, "kv_blocks_total": 4}


def inputs_of(request) -> dict[str, np.ndarray]:
    """Input name -> array, checked as Triton checks it: the bytes must fill the shape."""
    arrays = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            array = deserialize_bytes_tensor(raw)
        else:
            array = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype))
        arrays[tensor.name] = array.reshape(list(tensor.shape))
    return arrays


def response_of(request, outputs: dict[str, np.ndarray]):
    """One streamed response."""
    types = {"O": "BYTES", "i": "INT32", "f": "FP32"}
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, array in outputs.items():
        response.outputs.add(name=name, datatype=types[array.dtype.kind], shape=array.shape)
        raw = serialize_byte_tensor(array).item() if array.dtype == object else array.tobytes()
        response.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def text(value: str) -> np.ndarray:
    return np.array([value.encode()], dtype=object)


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The prompt says what happens; `requests` are all that came, `cancelled` who was cancelled."""

    def __init__(self) -> None:
        self.requests = []
        self.cancelled: dict[str, threading.Event] = {}
        self.left: dict[str, bool] = {}  # before the end that follows an error

    def ModelReady(self, request, context):  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name == "ensemble")

    def ModelInfer(self, request, context):  # noqa: N802
        assert request.model_name == "slipstream_health"
        assert inputs_of(request)["probe"].tolist() == [True]
        return response_of(request, {"status": text(json.dumps(HEALTH))}).infer_response

    def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        request = next(request_iterator)
        self.requests.append(request)
        over = self.cancelled.setdefault(request.id, threading.Event())
        context.add_callback(over.set)
        inputs = inputs_of(request)
        prompt = inputs["text_input"].ravel()[0].decode() if "text_input" in inputs else "tokens"
        yield from getattr(self, prompt.split()[0])(request, inputs, context, prompt)

    def say(self, request, inputs, context, prompt):
        """Each further word is a chunk, for every sequence that was asked for."""
        count = int(inputs.get("num_return_sequences", np.ones(1)).ravel()[0])
        for word in prompt.split(" ")[1:]:
            for index in range(count):
                outputs = {
                    "text_output": text(f"{word}{index if index else ''} "),
                    "num_input_tokens": np.array([5], np.int32),
                    "num_output_tokens": np.array([1], np.int32),
                }
                if count > 1:
                    outputs["sequence_index"] = np.array([index], np.int32)
                yield response_of(request, outputs)

    def forever(self, request, inputs, context, prompt):
        """Until the client leaves."""
        while context.is_active():
            yield response_of(request, {"text_output": text("x")})
            time.sleep(0.01)

    def silent(self, request, inputs, context, prompt):
        """No response until the client leaves."""
        while context.is_active():
            time.sleep(0.01)
        yield from ()

    def refuse(self, request, inputs, context, prompt):
        """The status and text that follow, after one chunk."""
        _, status, words = prompt.split(" ", 2)
        yield response_of(request, {"text_output": text("x")})
        context.abort(getattr(grpc.StatusCode, status), words)

    def full(self, request, inputs, context, prompt):
        """Refused as many times as the prompt says, then one chunk."""
        tries = sum(other.id == request.id for other in self.requests)
        if tries <= int(prompt.split()[1]):
            words = "UNAVAILABLE: the engine is full; retry_after_ms: 50"
            context.abort(grpc.StatusCode.UNAVAILABLE, words)
        yield from self.say(request, inputs, context, "say yes")

    def slow(self, request, inputs, context, prompt):
        """One chunk after so many seconds."""
        time.sleep(float(prompt.split()[1]))
        yield from self.say(request, inputs, context, "say late")

    def fail(self, request, inputs, context, prompt):
        """An error as a message in the stream, as servers send what happens after its beginning."""
        yield service_pb2.ModelStreamInferResponse(error_message=prompt.split(" ", 1)[1])
        time.sleep(0.1)  # it ends a little later; who leaves before is noted
        self.left[request.id] = not context.is_active()

    def stuck(self, request, inputs, context, prompt):
        """An error in a stream that does not end."""
        yield from self.fail(request, inputs, context, prompt)
        while context.is_active():
            time.sleep(0.01)

    def tokens(self, request, inputs, context, prompt):
        """The prompt's ids plus one, two at a time, in an array that is longer than its length."""
        ids = [int(i) + 1 for i in inputs["input_ids"].ravel()]
        for start in range(0, len(ids), 2):
            piece = ids[start : start + 2]
            yield response_of(
                request,
                {
                    "output_ids": np.array([[[*piece, 99]]], np.int32),
                    "sequence_length": np.array([[len(piece)]], np.int32),
                },
            )


def start() -> tuple[Triton, grpc.Server, str]:
    """The model, its running server and where it listens."""
    triton = Triton()
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return triton, server, f"127.0.0.1:{port}"
