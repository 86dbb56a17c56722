"""Requests in TensorRT-LLM's tensors, from arrays to validated structs.

`text_request` reads the text models (`ensemble` fused, `tensorrt_llm_bls`), `llm_request` the token
model (`tensorrt_llm`, alone or as a step of the ensemble). Arrays come without the batch dimension.
Every refusal is a ContractError that names field, value and limit.

Sampling follows what clients of these tensors rely on: without top_k and top_p (or both 0) decoding
is greedy; top_k above 0 with top_p 0 counts top_p as 1; top_k 0 with top_p above 0 is plain nucleus
sampling; temperature is 1 unless given, and 0 is greedy. Other filters, request parameters, ask
for sampling too.

Request parameters: any scalar input (see `inputs`), `min_p`, `ignore_eos`, `request_type`,
`Streaming` of NVIDIA's client, those that ask for drafts (see `drafts`), and OpenAI's names (see
`openai_names`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from slipstream_contract import limits, openai_names
from slipstream_contract.beams import BEAM_NAMES, trtllm_beams, with_log_probs, without_neutral
from slipstream_contract.drafts import DRAFT_NAMES, trtllm_drafts
from slipstream_contract.edits import trtllm_edits
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.fields import read_fields
from slipstream_contract.guide import TEXT_FIELD, TYPE_FIELD, trtllm_guide
from slipstream_contract.ids import TokenIds
from slipstream_contract.inputs import Inputs, is_triton_parameter, token_ids
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.lora import read_task, without_batch
from slipstream_contract.pairs import check_pairs
from slipstream_contract.prompt_table import read_table
from slipstream_contract.request import (
    GenerateRequest,
    ResponseOptions,
    Words,
    checked_bias,
    checked_words,
    choose_end_ids,
    split_handling,
)
from slipstream_contract.retention import read_retention
from slipstream_contract.sampling import FIELDS, FILTERS, SamplingParams, greedy, normalised
from slipstream_contract.tensors import ALIASES, MODELS, TO_LLM
from slipstream_contract.words import unpack_word_list

Arrays = Mapping[str, NDArray[Any]]

_LLM_NAMES = TO_LLM | {"max_tokens": "request_output_len"}
_LLM_NAMES |= {name: f"runtime_{name}" for name in ("top_p_min", "top_p_decay", "top_p_reset_ids")}
_TEXT_ALIASES = ALIASES | openai_names.SAME
_LLM_ALIASES = _TEXT_ALIASES | _LLM_NAMES
_LLM_LABELS = {name: f"{name} ({text})" for text, name in _LLM_NAMES.items()} | {
    "stop_words_list": "stop_words_list (stop_words)",
    "bad_words_list": "bad_words_list (bad_words)",
    "embedding_bias": "embedding_bias (embedding_bias_words)",
    "stop": "stop (which cancels the request of this id; stop words go into stop_words)",
}
_ASKED = {asked.name for entry in FIELDS.values() if (asked := entry.asked("trtllm")) is not None}
_OWN = (_ASKED | BEAM_NAMES) - MODELS["tensorrt_llm_bls"].inputs_by_name.keys()
_OWN |= {"ignore_eos", "request_type"} | DRAFT_NAMES
_UNFILTERED = {
    name: asked.default for name in FILTERS if (asked := FIELDS[name].asked("trtllm")) is not None
}
_DEFAULTS = {name: FIELDS[name].default for name in FILTERS}
_STREAMING = "Streaming"  # NVIDIA's client sends it beside `streaming`, and alone beside `stop`
_READ_ELSEWHERE = openai_names.NAMES | {"timeout_ms", "request_priority", "cache_salt", "probe"}


class Vocabulary(Protocol):
    """The part of TokenBytes that this module needs."""

    def raw(self, token_id: int) -> bytes:
        """Return a token's bytes, empty if the vocabulary does not have it."""


def text_request(
    inputs: Arrays, parameters: Mapping[str, object], exclude_input_in_output: bool = False
) -> GenerateRequest:
    """Read a request of `ensemble` or `tensorrt_llm_bls`. Raises ContractError.

    `exclude_input_in_output` counts where the request does not say.
    """
    handling, others = split_handling(parameters)
    most_tokens, scalars = _split(others)
    model = MODELS["tensorrt_llm_bls"]
    inputs = without_batch(inputs)
    is_streaming = scalars.pop(_STREAMING, None)
    read = Inputs(model, inputs, scalars, _TEXT_ALIASES, {}, _OWN, _READ_ELSEWHERE)
    read.put_flag("stream", _STREAMING, is_streaming)
    _check_type(read)
    text = read.text("text_input")
    if not text:
        raise ContractError("text_input is empty")
    sampling = _sampling(read, {}, most_tokens)
    stop_words = tuple(w.encode() for w in _texts(read, "stop_words", limits.MAX_STOP_BYTES))
    bias_words, bias_weights = _weighted(read)
    request = GenerateRequest(
        prompt=text,
        sampling=replace(sampling, stop_words=stop_words, drafts=trtllm_drafts(read)),
        options=_options(read, {}, exclude_input_in_output),
        words=Words(
            bad=_texts(read, "bad_words", limits.MAX_LIST_BYTES),
            biased=bias_words,
            weights=bias_weights,
            end_id=_end_id(read),
        ),
        add_special_tokens=read.flag_or_none("add_special_tokens"),
        task=read_task(read),
        table=read_table(read),
        **handling,
    )
    check_pairs(request, "trtllm")
    return request


def llm_request(
    inputs: Arrays,
    parameters: Mapping[str, object],
    vocab: Vocabulary | None = None,
    exclude_input_in_output: bool = False,
    end_ids: Sequence[int] = (),
    max_model_len: int | None = None,
    vocab_size: int | None = None,
) -> GenerateRequest:
    """Read a request of `tensorrt_llm`. Raises ContractError.

    Args:
        inputs, parameters: what came.
        vocab: the checkpoint's. Without one, stop words of several tokens are refused.
        exclude_input_in_output: counts where the request does not say.
        end_ids: the checkpoint's, of which `end_id` may name one. Without `end_id`, which
            preprocessing always sets, nothing but stop words ends a sequence early.
        max_model_len: of the engine, if known: a longer prompt is refused before it is taken apart.
        vocab_size: of the model, if known: logits of drafts have as many values.
    """
    handling, others = split_handling(parameters)
    most_tokens, scalars = _split(others)
    model = MODELS["tensorrt_llm"]
    inputs = without_batch(inputs)
    is_streaming = scalars.pop(_STREAMING, None)
    read = Inputs(model, inputs, scalars, _LLM_ALIASES, _LLM_LABELS, _OWN, _READ_ELSEWHERE)
    read.put_flag("streaming", _STREAMING, is_streaming)
    _check_type(read)
    if read.flag("stop"):
        nothing = SamplingParams(max_tokens=1)
        return GenerateRequest(prompt=TokenIds("i"), sampling=nothing, is_stop=True)
    prompt = _prompt(read, max_model_len)
    sampling = _sampling(read, _LLM_NAMES, most_tokens)
    stop_words, stop_token_ids = _stop_words(_word_ids(read, "stop_words_list"), vocab)
    end_id = _end_id(read)
    bad_words = checked_words(read.label("bad_words_list"), _word_ids(read, "bad_words_list"))
    sampling = replace(
        sampling,
        end_ids=choose_end_ids(-1 if end_id is None else end_id, end_ids),
        stop_words=stop_words,
        stop_token_ids=stop_token_ids,
        bad_words=bad_words,
        bias=_dense_bias(read),
        drafts=trtllm_drafts(read, vocab_size),
    )
    request = GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        options=_options(read, _LLM_NAMES, exclude_input_in_output),
        retention=read_retention(read),
        task=read_task(read),
        table=read_table(read, inputs["input_ids"].size),
        **handling,
    )
    check_pairs(request, "trtllm")
    return request


# --- parts of both -------------------------------------------------------------------------------


def _split(parameters: Mapping[str, object]) -> tuple[int | None, dict[str, object]]:
    """Return a second bound on the output, and parameters neither Triton's nor OpenAI's."""
    asked = {name: value for name, value in parameters.items() if not is_triton_parameter(name)}
    return openai_names.split_openai(asked)


def _check_type(read: Inputs) -> None:
    request_type = read.value("request_type", "context_and_generation")
    if request_type in ("context_only", "generation_only"):
        raise ContractError(f"request_type {request_type} is not supported yet")
    if request_type != "context_and_generation":
        raise ContractError(f"request_type is {clip(request_type)}, not context_and_generation")


def _sampling(read: Inputs, names: Mapping[str, str], most_tokens: int | None) -> SamplingParams:
    """Read numbers and flags, by the rules at the head of this file.

    `names` has the inputs of the text models that this one calls otherwise.
    """
    values = normalised(read_fields(SamplingParams, "trtllm", read, names), most_tokens)
    values |= {"order": "trtllm", "penalty_temperature": values["temperature"] or 1.0}
    values |= trtllm_edits(read)
    guide = trtllm_guide(*(read.text(x) if read.has(x) else None for x in (TYPE_FIELD, TEXT_FIELD)))
    n = values["n"] if read.has("num_return_sequences") else None
    if (beams := trtllm_beams(read, names, n)) is not None:
        filters = without_neutral(values, _UNFILTERED, _DEFAULTS)
        chosen = values | filters | {"n": n or beams.width, "beams": beams, "guide": guide}
        sampling: SamplingParams = with_log_probs(SamplingParams(**chosen), _logits(read))
        return sampling
    samples = any(values[name] != _UNFILTERED[name] for name in FILTERS)
    if not samples or values["temperature"] == 0.0 or values["top_k"] == 1:
        values = greedy(values)
    values["top_p"] = values["top_p"] or 1.0
    return SamplingParams(**values, values=_logits(read), guide=guide)


def _logits(read: Inputs) -> LogProbs | None:
    """Return which whole logits are wanted; None: none."""
    context, generation = (read.flag(f"return_{name}_logits") for name in ("context", "generation"))
    if not (context or generation):
        return None
    return LogProbs(context_logits=context, generation_logits=generation)


def _options(
    read: Inputs, names: Mapping[str, str], exclude_input_in_output: bool
) -> ResponseOptions:
    options = ResponseOptions(**read_fields(ResponseOptions, "trtllm", read, names))
    is_excluded = read.flag("exclude_input_in_output", exclude_input_in_output)
    return replace(options, echo=not (options.is_streaming or is_excluded))


def _end_id(read: Inputs) -> int | None:
    """Return the id that the request names; -1: none, None: not given. A pad id has no effect."""
    ids = {
        name: limits.check_whole(name, read.whole(name), -1, limits.INT32_MAX)
        for name in ("end_id", "pad_id")
        if read.has(name)
    }
    return -1 if read.flag("ignore_eos") else ids.get("end_id")


# --- text ----------------------------------------------------------------------------------------


def _texts(read: Inputs, name: str, limit: int) -> tuple[str, ...]:
    """Read words of at most `limit` bytes together; empty ones are left out."""
    words = [word for word in read.texts(name) if word]
    limits.check_word_bytes(name, [word.encode() for word in words], limit)
    return tuple(words)


def _weighted(read: Inputs) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Read the words whose tokens are biased, and their weights.

    Clients that do not use the two fields send one empty word, and perhaps a zero.
    """
    name = "embedding_bias_weights"
    array = read.array(name)
    weights = [] if array is None else [float(weight) for weight in array]
    words = read.texts("embedding_bias_words")
    if not any(words) and not any(weights):
        return (), ()
    if len(weights) != len(words):
        raise ContractError(
            f"{name} has {len(weights)} values for {len(words)} embedding_bias_words"
        )
    limits.check_word_bytes("embedding_bias_words", [word.encode() for word in words])
    for i, weight in enumerate(weights):
        limits.check_number(f"{name}[{i}]", weight, -limits.MAX_BIAS, limits.MAX_BIAS)
    return tuple(words), tuple(weights)


# --- tokens --------------------------------------------------------------------------------------


def _prompt(read: Inputs, max_model_len: int | None) -> TokenIds:
    """Read `input_ids` as far as `input_lengths` says; what follows is padding."""
    array = read.array("input_ids")
    if array is None:
        raise ContractError("input_ids is missing")
    if array.size == 0:
        raise ContractError("input_ids is empty: a prompt has at least 1 token")
    length = limits.check_whole("input_lengths", read.whole("input_lengths"), 1, array.size)
    if max_model_len is not None and length >= max_model_len:
        raise ContractError(
            f"the prompt is {length} tokens long: with one to generate it does not fit the context "
            f"of {max_model_len} tokens (max_model_len)"
        )
    return token_ids("input_ids", array[:length])


def _word_ids(read: Inputs, name: str) -> list[list[int]]:
    array = read.array(name)
    return [] if array is None else unpack_word_list(array, read.label(name))


def _stop_words(
    words: Sequence[Sequence[int]], vocab: Vocabulary | None
) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Return stop words as bytes and token ids; without a vocabulary each must be one token."""
    field = "stop_words_list (stop_words)"
    if vocab is None:
        limits.check_count(field, len(words), limits.MAX_WORDS, "words")
        for word in words:
            if len(word) > 1:
                raise ContractError(
                    f"{field} has a word of {len(word)} tokens; without a tokenizer in the "
                    "checkpoint, words of 1 token are served"
                )
        return (), tuple(word[0] for word in words)
    texts, ids = [], []
    for word in words:
        text = b"".join(vocab.raw(token_id) for token_id in word)
        if text:
            texts.append(text)
        elif len(word) == 1:  # models pad their vocabulary
            ids.append(word[0])
        else:
            raise ContractError(f"{field} has a word of tokens without a text: {clip(word)}")
    limits.check_word_bytes(field, texts, limits.MAX_STOP_BYTES)
    limits.check_count(field, len(ids), limits.MAX_WORDS, "words")
    return tuple(texts), tuple(ids)


def _dense_bias(read: Inputs) -> tuple[tuple[int, float], ...]:
    array = read.array("embedding_bias")
    if array is None:
        return ()
    ids = np.flatnonzero(array)  # NaN is not zero
    return checked_bias(
        read.label("embedding_bias"),
        {int(i): float(array[i]) for i in ids[: limits.MAX_BIASED_TOKENS + 1]},
        len(ids),
    )
