"""Write config.pbtxt from the declared tensors: readable and reproducible."""

import json
from collections.abc import Iterable, Mapping

from slipstream_contract.declarations import DType, Model, Tensor
from slipstream_contract.deployment import DEFAULT, name_of
from slipstream_contract.tensors import MODELS, TO_LLM

MARK = "# Written by `slipstream compose`, which overwrites it: change what it is called with."

Pairs = Iterable[tuple[str, str]]

_PRE, _LLM, _POST = "preprocessing", "tensorrt_llm", "postprocessing"

# Input of preprocessing -> input of the ensemble.
_PRE_INPUTS = {
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "ADD_SPECIAL_TOKENS": "add_special_tokens",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
# Input of tensorrt_llm -> output of preprocessing.
_PRE_TO_LLM = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "stop_words_list": "STOP_WORDS_IDS",
    "bad_words_list": "BAD_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
}
# Input of postprocessing -> output of tensorrt_llm. The inputs for whole texts are not connected.
_LLM_TO_POST = {"STREAM_STATE": "STREAM_STATE"}


def model_config(
    model: Model,
    parameters: Mapping[str, str],
    is_fused: bool = False,
    deployment: str = DEFAULT,
) -> str:
    """Return the whole file.

    Args:
        model: the declaration.
        parameters: key -> string value.
        is_fused: whether the bridge itself serves `ensemble`.
        deployment: whose models it is one of; they have its name in theirs.
    """
    is_ensemble = not model.backend and not is_fused
    lines = [MARK, "", f'name: "{name_of(deployment, model.name)}"']
    lines.append('platform: "ensemble"' if is_ensemble else f'backend: "{_backend(model)}"')
    lines.append(f"max_batch_size: {model.max_batch_size}")
    if model.is_decoupled or (is_fused and not model.backend):
        lines.append("model_transaction_policy { decoupled: true }")
    if model.has_dynamic_batching:
        lines.append(_batching(model))
    if not is_ensemble:
        group = f"{{ count: {model.num_instances} kind: {model.instance_kind} }}"
        lines += ["", "instance_group [", f"  {group}", "]"]
    lines += _tensor_list("input", model.inputs) + _tensor_list("output", model.outputs)
    for key, value in parameters.items():
        text = json.dumps(value, ensure_ascii=False)
        lines += ["", f'parameters {{ key: "{key}" value {{ string_value: {text} }} }}']
    if is_ensemble:
        lines += _scheduling(model, deployment)
    return "\n".join(lines) + "\n"


def _batching(model: Model) -> str:
    """Write Triton's queue in front of a model, which passes on many requests at a time.

    For a model that takes text it passes on one at a time: a text shorter than its declared
    size fails in Triton's Python backend, together with all requests beside it.
    """
    takes_text = any(tensor.dtype is DType.STRING for tensor in model.inputs)
    return f"dynamic_batching {{ {'preferred_batch_size: [ 1 ] ' if takes_text else ''}}}"


def _backend(model: Model) -> str:
    return model.backend or "slipstream"


def _tensor_list(kind: str, tensors: Iterable[Tensor]) -> list[str]:
    rows = [f"  {_tensor(tensor, kind == 'input')}," for tensor in tensors]
    rows[-1] = rows[-1].removesuffix(",")
    return ["", f"{kind} [", *rows, "]"]


def _tensor(tensor: Tensor, is_input: bool) -> str:
    dims = ", ".join(map(str, tensor.dims))
    text = f'name: "{tensor.name}" data_type: TYPE_{tensor.dtype} dims: [ {dims} ]'
    if tensor.is_scalar:
        text += " reshape { shape: [ ] }"
    if is_input and tensor.is_ragged:
        text += " allow_ragged_batch: true"
    if is_input and tensor.is_optional:
        text += " optional: true"
    return f"{{ {text} }}"


def _scheduling(ensemble: Model, deployment: str) -> list[str]:
    """Write the three steps. Postprocessing gets no input from preprocessing: only the first
    response of a decoupled step would receive it.
    """
    pre, llm, post = (name_of(deployment, role) for role in (_PRE, _LLM, _POST))
    lines = ["", "ensemble_scheduling {", "  step ["]
    lines += _step(pre, _PRE_INPUTS.items(), _internal(_PRE_TO_LLM.values()))
    lines[-1] += ","
    lines += _step(llm, _llm_inputs(ensemble), _llm_outputs(ensemble))
    lines[-1] += ","
    lines += _step(
        post,
        ((name, f"_{source}") for name, source in _LLM_TO_POST.items()),
        [("OUTPUT", "text_output")],
    )
    return [*lines, "  ]", "}"]


def _internal(names: Iterable[str]) -> list[tuple[str, str]]:
    """Map names to internal tensors, which start with an underscore and clients do not see."""
    return [(name, f"_{name}") for name in names]


def _llm_inputs(ensemble: Model) -> list[tuple[str, str]]:
    from_client = {TO_LLM.get(tensor.name, tensor.name): tensor.name for tensor in ensemble.inputs}
    pairs = []
    for tensor in MODELS[_LLM].inputs:
        if tensor.name in _PRE_TO_LLM:
            pairs.append((tensor.name, f"_{_PRE_TO_LLM[tensor.name]}"))
        elif tensor.name in from_client:
            pairs.append((tensor.name, from_client[tensor.name]))
    return pairs


def _llm_outputs(ensemble: Model) -> list[tuple[str, str]]:
    to_client = {tensor.name for tensor in ensemble.outputs}
    shared = [(t.name, t.name) for t in MODELS[_LLM].outputs if t.name in to_client]
    return _internal(_LLM_TO_POST.values()) + shared


def _step(model: str, inputs: Pairs, outputs: Pairs) -> list[str]:
    maps = [("input_map", inputs), ("output_map", outputs)]
    rows = [
        f'      {kind} {{ key: "{key}" value: "{value}" }}'
        for kind, pairs in maps
        for key, value in pairs
    ]
    head = [f'      model_name: "{model}"', "      model_version: -1"]
    return ["    {", *head, *rows, "    }"]
