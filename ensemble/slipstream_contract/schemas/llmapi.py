"""Requests in the tensors of NVIDIA's LLM-API model, by the LLM API's own rules.

A tensor `sampling_param_X` is vLLM's parameter `X`, with other defaults: 32 tokens, and greedy
decoding unless the request has a temperature or a filter. A `top_p` of 0 and a `top_k` of 1 are
greedy too. Every other parameter of vLLM's that needs no output of its own may be a request
parameter, under its own name, and so may each of the scalar tensors, with or without its prefix.

A request has one text. `stop` cancels the request of the same id.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from numpy.typing import NDArray

from slipstream_contract import limits
from slipstream_contract.declarations import DType
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import TokenIds
from slipstream_contract.inputs import Inputs, is_triton_parameter, to_flag, to_number
from slipstream_contract.openai_names import MAX_COMPLETION_TOKENS
from slipstream_contract.pairs import check_pairs
from slipstream_contract.request import GenerateRequest, ResponseOptions, split_handling
from slipstream_contract.sampling import FILTERS, SamplingParams
from slipstream_contract.schemas.vllm import Values, build_request, read_values
from slipstream_contract.tensors import LLMAPI

LLMAPI_MAX_TOKENS = 32

_PREFIX = "sampling_param_"
_STOP, _SEED, _ADD_SPECIAL = "stop", "seed", "add_special_tokens"
_FLAGS = frozenset({"exclude_input_from_output", "return_perf_metrics"})
_NUMBERS = {
    tensor.name.removeprefix(_PREFIX): tensor.dtype
    for tensor in LLMAPI.inputs
    if tensor.name.startswith(_PREFIX) and tensor.dtype in (DType.INT32, DType.FP32, DType.UINT64)
}
_NAMES = {name: _PREFIX + name for name in (*_NUMBERS, *_FLAGS)} | {"Streaming": "streaming"}
"""Request parameter -> the tensor that it stands for; NVIDIA's client sends `Streaming`."""

_LABELS = {name: _PREFIX + name for name in (*_NUMBERS, _STOP)}
_STOP_LABEL = {"stop": "stop (which cancels the request of this id; see sampling_param_stop)"}
_WITHOUT_OUTPUT = ("logprobs", "prompt_logprobs", "logprobs_mode")


def llmapi_request(
    inputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, object]
) -> GenerateRequest:
    """Read a request of the LLM-API model. Raises ContractError."""
    handling, others = split_handling(parameters)
    asked = {name: value for name, value in others.items() if not is_triton_parameter(name)}
    scalars = {name: value for name, value in asked.items() if _is_tensor(name)}
    own = {name: value for name, value in asked.items() if name not in scalars}
    read = Inputs(LLMAPI, inputs, scalars, _NAMES, _STOP_LABEL)
    if read.flag("stop"):
        nothing = SamplingParams(max_tokens=1)
        return GenerateRequest(prompt=TokenIds("i"), sampling=nothing, is_stop=True)
    text = _text(read)
    add_special_tokens = own.pop(_ADD_SPECIAL, None)
    values, seed = _values(read, own)
    request = build_request(
        text,
        values,
        _options(read),
        None if add_special_tokens is None else to_flag(_ADD_SPECIAL, add_special_tokens),
        handling,
    )
    check_pairs(request, "llmapi")
    # Log probs are TensorRT-LLM's, of the edited logits; vLLM's are before any edit.
    log_probs = request.options.cumulative_log_prob
    changes: dict[str, Any] = {"seed": seed, "log_probs": log_probs, "values": None}
    sampling = msgspec.structs.replace(request.sampling, **changes)
    adapter = read.text("lora_name") if read.has("lora_name") else request.adapter
    return msgspec.structs.replace(request, sampling=sampling, adapter=adapter)


def _is_tensor(name: str) -> bool:
    """Return whether a request parameter stands for a tensor; `stop`: for words, as vLLM's."""
    return name in _NAMES or (name != _STOP and name in LLMAPI.inputs_by_name)


def _text(read: Inputs) -> str:
    texts = read.texts("text_input")
    if len(texts) != 1:
        raise ContractError(
            f"text_input has {len(texts)} texts, not 1: send a request for each, they run together"
        )
    return texts[0]


def _values(read: Inputs, own: Mapping[str, object]) -> tuple[Values, int | None]:
    """Return the request as vLLM's parameters, and the seed. Raises ContractError."""
    given: dict[str, object] = {}
    for name, dtype in _NUMBERS.items():
        if read.has(_PREFIX + name):
            is_float = dtype is DType.FP32
            given[name] = read.number(_PREFIX + name) if is_float else read.whole(_PREFIX + name)
    words = [word for word in read.texts(_PREFIX + _STOP) if word]
    if words:
        if own.get(_STOP) is not None:
            raise ContractError(f"{_PREFIX}{_STOP} and {_STOP} are given but mean the same")
        given[_STOP] = words
    for name in _WITHOUT_OUTPUT:
        if own.get(name) is not None:
            raise ContractError(f"{name} has no output in this contract: ask vllm_model for it")
    given.pop(_SEED, None)
    seed = _whole(read, _SEED, limits.UINT64_MAX)
    _whole(read, "top_k", limits.INT32_MAX)  # vLLM has -1, too
    asked = {**own, **given}
    if MAX_COMPLETION_TOKENS not in asked and asked.get("max_tokens") is None:
        asked["max_tokens"] = LLMAPI_MAX_TOKENS
    return read_values(_greedy(asked), _LABELS), seed


def _whole(read: Inputs, name: str, most: int) -> int | None:
    label = _PREFIX + name
    return limits.check_whole(label, read.whole(label), 0, most) if read.has(label) else None


def _greedy(asked: dict[str, object]) -> dict[str, object]:
    """Return the parameters with temperature 0 where the LLM API decodes greedily."""
    is_top_p_0 = asked.get("top_p") is not None and to_number("top_p", asked["top_p"]) == 0
    is_sampled = any(asked.get(name) is not None for name in ("temperature", *FILTERS))
    if is_sampled and asked.get("top_k") != 1 and not is_top_p_0:
        return asked
    if is_top_p_0:
        asked = {name: value for name, value in asked.items() if name != "top_p"}
    return {**asked, "temperature": _checked_temperature(asked.get("temperature"))}


def _checked_temperature(value: object) -> float:
    """Return 0, after a look at the temperature that has no effect. Raises ContractError."""
    if value is not None:
        label = f"{_PREFIX}temperature"
        limits.check_number(label, to_number(label, value), 0, limits.MAX_TEMPERATURE)
    return 0.0


def _options(read: Inputs) -> ResponseOptions:
    return ResponseOptions(
        is_streaming=read.flag("streaming"),
        echo=not read.flag(f"{_PREFIX}exclude_input_from_output"),
        cumulative_log_prob=read.flag("return_cumulative_logprob"),
        finish_reason=read.flag("return_finish_reason"),
        stop_reason=read.flag("return_stop_reason"),
        perf_metrics=read.flag(f"{_PREFIX}return_perf_metrics"),
    )
