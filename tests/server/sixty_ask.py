"""Sends what is in sixty.py, each case over all the ways that it can take, and checks the answer.

Statuses. HTTP has a number for each refusal. gRPC has a code where a model has ModelInfer, which
are the stages alone. The models that generate are decoupled: they answer ModelStreamInfer, whose
call ends with OK whatever is refused in it, as the refusal is a text in one of its responses. So
its code can stand in the text only, and ours does: INVALID_ARGUMENT. Tritonserver's own words have
none. (With the header `triton_grpc_error` calls would have true codes; a 24.10 crashes of it.)
"""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from server.sixty_cases import GOOD, MODELS, PATHS, Beside, Call, Grpc, Http, Raw
from server.support import Client
from slipstream_contract.inputs import NUMPY
from slipstream_contract.tensors import MODELS as CONTRACT
from slipstream_contract.tensors import DType, Tensor
from tritonclient.grpc import service_pb2 as messages

LATEST_S = 60.0  # an answer comes at once; the machine may be busy
MAX_SAID = 800  # characters of a refusal of ours
_SERVICE = "/inference.GRPCInferenceService/"
# Of what a refusal's text repeats, a channel takes 8 KB; up to 16 it refuses some, by chance.
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_NO_LIMIT += [("grpc.max_metadata_size", 1 << 16), ("grpc.absolute_max_metadata_size", 1 << 16)]
_OURS = re.compile(r"(in ensemble 'ensemble', )?(INVALID_ARGUMENT|ALREADY_EXISTS): ")
_SERVERS = re.compile(
    r"failed to parse the request JSON|attempt to get members|Unable to parse|has invalid type|"
    r"already exists in request|unknown model|^Not Found$|batch size does not match|"
    r"batch-size must be|expected number of inputs|unexpected inference (in|out)put|"
    r"data-type is|unexpected shape|byte size mismatch|incomplete string data|"
    r"number of string elements|All input dimensions|unable to find data|decoupled transaction|"
    r"can not convert input"
)


def check(said: str, expected: str) -> None:
    """It is what is expected, ours or the server's, and holds nothing that is nobody's business."""
    assert re.search(expected, said, re.S), f"{said[:600]} is not {expected}"
    assert not re.search(r"Traceback|\.py\b|File \"|INTERNAL", said), said[:600]
    assert _OURS.match(said) or _SERVERS.search(said), f"{said[:600]} has no code"
    if "unknown model" not in said:  # the server repeats a model's name as it is
        assert not re.search(r"(.)\1{64}", said), f"{said[:600]}: a value is not cut"
        assert len(said) <= MAX_SAID, said[:600]


def ask(client: Client, case: Http | Grpc | Call | Raw) -> None:
    match case:
        case Http():
            _ask_http(client, case)
        case Grpc():
            _ask_grpc(client, case)
        case Call():
            code, details, _ = call(client, case.method, case.data, case.metadata)
            assert code == case.code, f"{case.method} {case.data[:80]!r}: {code} {details}"
            assert re.search(case.expected, details), details
        case Raw():
            status, said = raw(client, case.data)
            assert status == case.status, f"{case.data[:80]!r}: {status} {said[:300]}"
            assert re.search(case.expected, said, re.S), said


def _ask_http(client: Client, case: Http) -> None:
    for model in PATHS.get(case.path, (case.path,)):
        body = whole(model, case.body)
        for verb in ("generate", "generate_stream"):
            status, said = client.post(f"{model}/{verb}", body, LATEST_S)
            assert status == case.status, f"{model}/{verb}: {status} {said[:300]}"
            check(json.loads(said.removeprefix("data: "))["error"], case.expected)
        if case.alone:
            continue
        requests = list(as_tensors(model, body))
        assert requests or case.status == 500, "gRPC cannot say it: `alone` must say why"
        for request, mistyped in requests:
            expected = f"{mistyped!r} data-type is" if mistyped else case.expected
            _ask_stream(client, request, expected)


def _ask_grpc(client: Client, case: Grpc) -> None:
    inputs = GOOD.get(case.model, {}) | case.tensors
    inputs = {name: value for name, value in inputs.items() if value is not None}
    request = messages.ModelInferRequest(model_name=case.model)
    for tensor in client.tensors(case.model, inputs):
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    if case.change is not None:
        case.change(request)
    _ask_stream(client, request, case.expected)
    if case.model in MODELS:
        return
    code, details, _ = call(client, "ModelInfer", request.SerializeToString())
    assert code == case.code, f"{code} {details}"
    check(details, case.expected)
    if not case.alone:
        status, said = infer(client, request)
        assert status == case.status, f"{status} {said}"
        check(json.loads(said)["error"], case.infer_expected or case.expected)


def _ask_stream(client: Client, request: Any, expected: str) -> None:
    code, details, replies = call(client, "ModelStreamInfer", request.SerializeToString())
    assert code == "OK", f"{code} {details}"
    answers = [messages.ModelStreamInferResponse.FromString(reply) for reply in replies]
    assert len(answers) == 1, answers[:2]
    check(answers[0].error_message, expected)


def call(
    client: Client, method: str, data: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> tuple[str, str, list[bytes]]:
    """The code's name, its text, and the replies. A method of one reply is called like others."""
    with grpc.insecure_channel(client.address, options=_NO_LIMIT) as channel:
        ask = channel.stream_stream(_SERVICE + method)
        running = ask(iter([data]), timeout=LATEST_S, metadata=metadata)
        replies: list[bytes] = []
        with contextlib.suppress(grpc.RpcError):  # its code is the call's, too
            replies += running
        return running.code().name, running.details() or "", replies


def infer(client: Client, request: Any) -> tuple[int, str]:
    """A message as HTTP's `infer` has it, its tensors in binary. The status and the answer."""
    pairs = list(zip(request.inputs, request.raw_input_contents, strict=True))
    head: dict[str, Any] = {"inputs": []}
    for tensor, data in pairs:
        asked = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
        head["inputs"].append(asked | {"parameters": {"binary_data_size": len(data)}})
    if request.outputs:
        head["outputs"] = [{"name": output.name} for output in request.outputs]
    written = json.dumps(head).encode()
    connection = http.client.HTTPConnection(client.http.removeprefix("http://"), timeout=LATEST_S)
    try:
        connection.request(
            "POST",
            f"/v2/models/{request.model_name}/infer",
            written + b"".join(data for _, data in pairs),
            {"Inference-Header-Content-Length": str(len(written))},
        )
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def raw(client: Client, data: bytes, patience_s: float = LATEST_S) -> tuple[int, str]:
    """The status and the beginning of the answer; CLOSED where the server ends the connection.

    Raises TimeoutError where it does neither.
    """
    host, port = client.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), patience_s) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer before it has read all
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while b'"error"' not in answer and (more := connection.recv(4096)):
                answer += more
    found = re.match(rb"HTTP/1\.[01] (\d+)", answer)
    assert found or not answer, answer
    return (int(found[1]) if found else 0), answer.decode(errors="replace")


def whole(model: str, body: Any) -> Any:
    """The body that is sent to a model."""
    if not isinstance(body, Beside):
        return body
    return {name: value for name, value in (GOOD[model] | body).items() if value is not ...}


# --- a body of JSON as tensors -------------------------------------------------------------------


def as_tensors(model: str, body: Any) -> Iterator[tuple[Any, str]]:
    """The request that a body asks for, and the tensor in it that has a wrong type.

    Nothing where gRPC cannot say it: what is no object, no text, or a number that no type has.
    """
    try:
        fields = list(body.items()) if isinstance(body, dict) else _pairs(body)
        request = messages.ModelInferRequest(model_name=model)
        mistyped = ""
        inputs = CONTRACT[model].inputs_by_name if model in CONTRACT else {}
        for name, value in fields:
            if name == "id":
                request.id = value
            elif name in inputs:
                is_batched = CONTRACT[model].max_batch_size > 0
                if _add(request, inputs[name], value, is_batched):
                    mistyped = name
            else:
                _put(request.parameters[name], value)
    except (ValueError, RecursionError, UnicodeError):
        return
    yield request, mistyped


def _pairs(body: bytes) -> list[tuple[str, Any]]:
    """Raises ValueError where it is no JSON object."""
    found = json.loads(body.decode(errors="surrogateescape"), object_pairs_hook=tuple)
    if not isinstance(found, tuple):
        raise ValueError("no object")
    return list(found)


def _put(parameter: Any, value: Any) -> None:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    kind = kinds.get(type(value), "")
    setattr(parameter, kind or "string_param", value if kind else json.dumps(value))


def _add(request: Any, spec: Tensor, value: Any, is_batched: bool) -> bool:
    """A tensor of the contract's type, or else of the values' own: then true."""
    values = value if isinstance(value, list) else [value]
    is_fitting = all(_fits(spec.dtype, each) for each in values)
    dtype = spec.dtype if is_fitting else _own_type(values)
    name = "BYTES" if dtype is DType.STRING else str(dtype)
    shape = [len(values)]
    if is_batched:
        shape = [len(values), 1] if spec.dims == (1,) else [1, len(values)]
    if dtype is DType.STRING:
        texts = [each.encode(errors="surrogateescape") for each in values]
        data = b"".join(len(each).to_bytes(4, "little") + each for each in texts)
    else:
        data = np.array(values, np.float64 if dtype == "FP64" else NUMPY[DType(dtype)]).tobytes()
    request.inputs.add(name=spec.name, datatype=name, shape=shape)
    request.raw_input_contents.append(data)
    return not is_fitting


def _fits(dtype: DType, value: Any) -> bool:
    if dtype is DType.STRING:
        return isinstance(value, str)
    if dtype is DType.BOOL:
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if dtype.startswith("FP"):
        return True
    info = np.iinfo(NUMPY[dtype])
    return isinstance(value, int) and info.min <= value <= info.max


def _own_type(values: list[Any]) -> str:
    """Raises ValueError where there is none for them."""
    if all(isinstance(value, str) for value in values):
        return DType.STRING
    if all(isinstance(value, bool) for value in values):
        return DType.BOOL
    for dtype in (DType.INT64, DType.UINT64):
        if all(_fits(dtype, value) for value in values):
            return dtype
    if all(isinstance(value, float) for value in values):
        return "FP64"
    raise ValueError("no type")
