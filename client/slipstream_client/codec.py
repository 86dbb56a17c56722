"""Translate parameters to tensors and tensors to chunks, by the contract's tables. No network.

Four families of models: text (`ensemble`, `tensorrt_llm_bls`), vLLM (`vllm_model`, whose sampling
parameters travel as JSON), token ids (`tensorrt_llm`, where some names differ) and NVIDIA's LLM API
(`llmapi_model`, whose answer comes whole: its streams repeat their text in every response). The
models of a deployment with a name speak like those without one: `chat_vllm_model` like
`vllm_model`, and `chat`, as any name that ends in no such word, like `ensemble`.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from slipstream_contract.declarations import Model, Tensor
from slipstream_contract.deployment import name_of, role_of, split_name
from slipstream_contract.errors import Code, ContractError, clip
from slipstream_contract.inputs import to_whole
from slipstream_contract.limits import check_whole
from slipstream_contract.probes import PROBE
from slipstream_contract.tensors import LLMAPI, MODELS, TO_LLM
from slipstream_contract.whole import RUNNING
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from slipstream_client.results import Array, Chunk

ENSEMBLE, BLS, VLLM = "ensemble", "tensorrt_llm_bls", "vllm_model"
TENSORRT_LLM = "tensorrt_llm"
HEALTH = "slipstream_health"
STREAMED = (ENSEMBLE, BLS, VLLM, TENSORRT_LLM)
"""Models whose responses hold what is new, and count its tokens."""

GENERATING = {name: MODELS[name] for name in STREAMED} | {LLMAPI.name: LLMAPI}
_LLMAPI_PREFIX = "sampling_param_"

_TOKEN_NAMES = TO_LLM | {"max_tokens": "request_output_len"}
"""Names of the text models that the token model spells differently; it accepts both spellings."""


_REQUEST_PARAMETERS = {
    "timeout_ms": "timeout_ms",
    "priority": "request_priority",
    PROBE: PROBE,
}
"""Parameters of the request rather than of the model -> their names over gRPC."""


def request_of(
    model: str,
    prompt: str | Sequence[int],
    parameters: Mapping[str, object],
    request_id: str,
) -> Any:
    """Build the `ModelInferRequest` of a stream. Raises ContractError for an unknown parameter.

    `model` is the name of any deployment's model.

    The request streams even for a client that waits for the whole text: Triton does not tell a
    running ensemble step that its client has disconnected, so a step that sends nothing before
    its end could not be cancelled.
    """
    role = role_of(model)
    declared = GENERATING.get(role)
    if declared is None or not model:
        names = ", ".join(GENERATING)
        raise ContractError(f"no model {clip(model)} generates; {names} do", Code.NOT_FOUND)
    own = {name: parameters[name] for name in _REQUEST_PARAMETERS if name in parameters}
    others = {name: value for name, value in parameters.items() if name not in own}
    values = _values(role, prompt, others)
    if role == LLMAPI.name:
        own |= {n: values.pop(n) for n in list(values) if n not in LLMAPI.inputs_by_name}
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in own.items():
        if name not in _REQUEST_PARAMETERS or name == PROBE:
            request.parameters[name].string_param = str(value)
        elif value is not None:
            request.parameters[_REQUEST_PARAMETERS[name]].int64_param = check_whole(
                name, to_whole(name, value), 0
            )
    for name, value in values.items():
        tensor = _input(declared, model, name)
        array = to_array(tensor, value)
        if declared.max_batch_size:
            array = array[None]
        request.inputs.add(name=name, datatype=_wire_type(tensor), shape=array.shape)
        request.raw_input_contents.append(_to_bytes(array))
    return request


def _values(
    role: str, prompt: str | Sequence[int], parameters: Mapping[str, object]
) -> dict[str, object]:
    """Return input name -> value: the prompt, the output flags of this client, the parameters."""
    given = {name: value for name, value in parameters.items() if value is not None}
    counts: dict[str, object] = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    flags = counts | {"exclude_input_in_output": True}
    if role == TENSORRT_LLM:
        if isinstance(prompt, str):
            raise ContractError(f"{role} takes token ids, not text: ask {ENSEMBLE}")
        token_ids = list(prompt)
        named = {_TOKEN_NAMES.get(name, name): value for name, value in given.items()}
        own = {"input_ids": token_ids, "input_lengths": len(token_ids), "streaming": True}
        return own | flags | named
    if not isinstance(prompt, str):
        raise ContractError(f"{role} takes text, not {clip(prompt)}: ask {TENSORRT_LLM}")
    if role == LLMAPI.name:
        return _llmapi_values(prompt, given)
    own = {"text_input": prompt, "stream": True}
    if role != VLLM:
        return own | flags | given
    inputs = {tensor.name for tensor in GENERATING[role].inputs}
    tensors = {name: value for name, value in given.items() if name in inputs}
    sampling = {name: value for name, value in given.items() if name not in inputs}
    flags["return_finish_reason"] = True
    return own | flags | {"sampling_parameters": json.dumps(sampling)} | tensors


def _llmapi_values(prompt: str, given: Mapping[str, object]) -> dict[str, object]:
    """Return tensor, or request parameter, -> value; numbers by their names with or without prefix.

    Words to stop at are `stop`, as vLLM calls them; true cancels, as the tensor of that name does.
    """
    names = {name: _LLMAPI_PREFIX + name for name in given}
    named = {
        names[name] if names[name] in LLMAPI.inputs_by_name and value is not True else name: value
        for name, value in given.items()
    }
    flags = {"return_finish_reason": True, f"{_LLMAPI_PREFIX}exclude_input_from_output": True}
    return {"text_input": prompt} | flags | named


def _input(declared: Model, model: str, name: str) -> Tensor:
    inputs = {tensor.name: tensor for tensor in declared.inputs}
    if name in inputs:
        return inputs[name]
    near = difflib.get_close_matches(name, inputs, n=1)
    hint = f"; do you mean {near[0]}?" if near else f"; it has {', '.join(inputs)}"
    raise ContractError(f"{model} has no input {clip(name)}{hint}")


def to_array(tensor: Tensor, value: object) -> Array:
    """Convert a value to an array of the tensor's type with at least one dimension.

    Raises ContractError if the conversion would change a number.
    """
    if tensor.dtype == "STRING":
        return _strings(tensor.name, value)
    try:
        array = np.atleast_1d(np.asarray(value))
        kind = np.dtype(_NUMPY[tensor.dtype])
        if array.dtype.kind not in _ACCEPTED[kind.kind] and array.size:
            raise TypeError
        with np.errstate(over="ignore"):
            converted = array.astype(kind)
        is_kept = np.isinf(converted) == np.isinf(array) if kind.kind == "f" else converted == array
        if not np.all(is_kept):
            raise OverflowError
    except (TypeError, ValueError, OverflowError):
        message = f"{tensor.name} is {clip(value)}, which is no {tensor.dtype}"
        raise ContractError(message) from None
    return converted


def _strings(name: str, value: object) -> Array:
    items = [value] if isinstance(value, str | bytes) else value
    if not isinstance(items, Sequence) or not all(isinstance(i, str | bytes) for i in items):
        raise ContractError(f"{name} is {clip(value)}, which is neither a text nor a list of texts")
    try:
        encoded = [item.encode() if isinstance(item, str) else item for item in items]
    except UnicodeEncodeError:
        raise ContractError(f"{name} holds half of a surrogate pair, which is no text") from None
    array = np.empty(len(encoded), dtype=np.object_)
    array[:] = encoded
    return array


_NUMPY = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "FP16": "float16",
    "FP32": "float32",
}
_ACCEPTED = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""Kind of the tensor's dtype -> kinds of values that convert to it without loss."""


def _to_bytes(array: Array) -> bytes:
    if array.dtype == np.object_:
        serialized = serialize_byte_tensor(array)
        return bytes(serialized.item()) if serialized.size else b""
    return array.tobytes()


def _wire_type(tensor: Tensor) -> str:
    return "BYTES" if tensor.dtype == "STRING" else str(tensor.dtype)


def chunks_of(response: Any) -> list[Chunk]:
    """Return the chunks of a `ModelInferResponse`: one, or one per sequence if it has them all.

    `vllm_model` with n > 1 sends all sequences at once: text, reason and counts have n entries.
    """
    result = InferResult(response)
    outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
    first = _number(outputs.get("sequence_index")) or 0
    text = outputs.get("text_output")
    return [
        Chunk(
            text=_text(text, index),
            sequence_index=first + index,
            token_ids=_token_ids(outputs),
            num_input_tokens=_number(outputs.get("num_input_tokens")),
            num_output_tokens=_number(outputs.get("num_output_tokens"), index),
            finish_reason=_reason(outputs.get("finish_reason"), index),
            outputs=outputs,
        )
        for index in range(max(1, text.size) if text is not None else 1)
    ]


def health_model_of(model: str) -> str:
    """Return the health model of the deployment that a model belongs to."""
    return name_of(split_name(model)[0], HEALTH)


def health_request(model: str = HEALTH) -> Any:
    """Build a `ModelInferRequest` to a health model."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in MODELS[HEALTH].inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=[1])
        request.raw_input_contents.append(b"\x01")
    return request


def health_of(response: Any) -> dict[str, Any]:
    """Parse the JSON object in a response of the health model."""
    text = _text(InferResult(response).as_numpy(MODELS[HEALTH].outputs[0].name))
    state = json.loads(text)
    assert isinstance(state, dict), "the health model answers with a JSON object"
    return state


def _text(array: Array | None, index: int = 0) -> str:
    if array is None or index >= array.size:
        return ""
    return bytes(array.ravel()[index]).decode()


def _reason(array: Array | None, index: int) -> str | None:
    reason = _text(array, index)
    return None if reason in ("", RUNNING) else reason


def _number(array: Array | None, index: int = 0) -> int | None:
    return int(array.ravel()[index]) if array is not None and index < array.size else None


def _token_ids(outputs: Mapping[str, Array]) -> tuple[int, ...]:
    """Return the first `sequence_length` ids of `output_ids` [1, n]."""
    token_ids, length = outputs.get("output_ids"), _number(outputs.get("sequence_length"))
    if token_ids is None:
        return ()
    return tuple(int(token_id) for token_id in token_ids.ravel()[:length])
