"""Requests in vLLM's tensors (`vllm_model`), by vLLM's own rules.

Sampling parameters come as JSON in `sampling_parameters` or, without it, as request parameters,
whose values may be strings. A key that vLLM does not have is refused by name; one that it
has and we do not is accepted at the value that has no effect.
"""

import json
import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream_contract import limits, openai_names
from slipstream_contract.beams import vllm_beams, with_log_probs, without_neutral
from slipstream_contract.edits import VLLM_NAMES as EDIT_NAMES
from slipstream_contract.edits import vllm_edits
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.fields import read_fields
from slipstream_contract.guide import VLLM_NAMES, Guide, vllm_guide
from slipstream_contract.ids import TokenIds
from slipstream_contract.inputs import (
    Inputs,
    decode,
    is_triton_parameter,
    refuse_parameter,
    refuse_unsupported,
    to_flag,
    to_number,
    to_whole,
)
from slipstream_contract.log_probs import LogProbs, check_mode, check_num_top
from slipstream_contract.pairs import check_pairs
from slipstream_contract.request import GenerateRequest, ResponseOptions, Words, split_handling
from slipstream_contract.sampling import FIELDS, FILTERS, SamplingParams, greedy, normalised
from slipstream_contract.tensors import MODELS

_UNFILTERED = {name: FIELDS[name].default for name in FILTERS}
# Parameters of vLLM that we do not serve -> values that ask for nothing.
_LATER: dict[str, tuple[object, ...]] = {
    "flat_logprobs": (None, False),
    "truncate_prompt_tokens": (None, -1),
    "spaces_between_special_tokens": (None, True),
    "detokenize": (None, True),
    "output_kind": (None,),
    "extra_args": (None, {}),
    "skip_reading_prefix_cache": (None, False),
    "repetition_detection": (None,),
}
# Names of vLLM's and of the LLM API's that an engine is started with.
_OF_ENGINE = ("speculative_config", "num_speculative_tokens", "lookahead_config")
_SERVED = frozenset(
    {asked.name for entry in FIELDS.values() if (asked := entry.asked("vllm")) is not None}
    | {"stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "bad_words", "logit_bias"}
    | {"logprobs", "prompt_logprobs", "logprobs_mode", "add_special_tokens", "lora_name"}
    | {"use_beam_search", "length_penalty", "early_stopping"}
    | VLLM_NAMES
    | EDIT_NAMES
)


def known_names() -> frozenset[str]:
    """Return every name that `read_values` knows: served, without effect, or refused by value."""
    return _SERVED | _LATER.keys() | frozenset(_OF_ENGINE) | openai_names.NAMES


def refused_names() -> dict[str, tuple[object, ...]]:
    """Return names that vLLM has and no request may use -> values that ask for nothing."""
    return _LATER | dict.fromkeys(_OF_ENGINE, (None,))


def vllm_request(
    inputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, object]
) -> GenerateRequest:
    """Read a request of `vllm_model`. Raises ContractError."""
    read = Inputs(MODELS["vllm_model"], inputs, {}, {}, {})
    handling, others = split_handling(parameters)
    values = _parameters(read, others)
    text = read.text("text_input")
    add_special_tokens = _add_special_tokens(read, values)
    request = build_request(text, values, _options(read, values), add_special_tokens, handling)
    check_pairs(request, "vllm")
    return request


def build_request(
    prompt: str | TokenIds,
    values: "Values",
    options: ResponseOptions,
    add_special_tokens: bool | None,
    handling: Mapping[str, Any],
) -> GenerateRequest:
    """Return the request that vLLM's parameters ask for. Raises ContractError.

    Bad words are banned as they are and after a space, as tokenizers write them in a text; they
    stay words where the prompt is token ids.
    `handling` is what `split_handling` returns.
    """
    if not prompt:
        raise ContractError("text_input is empty")
    sampling = _sampling(values)
    wanted = _log_probs(values, options.log_probs or options.cumulative_log_prob)
    if sampling.beams is None:
        sampling = msgspec.structs.replace(sampling, values=wanted)
    else:
        sampling = with_log_probs(sampling, wanted)
    bad_words = values.words("bad_words", limits.MAX_LIST_BYTES)
    return GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        options=options,
        words=Words(
            bad=tuple(form for word in bad_words for form in (word, f" {word.lstrip()}")),
            end_id=-1 if values.flag("ignore_eos") else None,
        ),
        add_special_tokens=add_special_tokens,
        adapter=values.text("lora_name"),
        **handling,
    )


class Values:
    """Sampling parameters, cast. A null is as good as nothing.

    `most_tokens` is a second bound on the output; `labels`: name -> the name that errors give it.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        most_tokens: int | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.most_tokens = most_tokens
        self._values = {name: value for name, value in values.items() if value is not None}
        self._labels = labels

    def label(self, name: str) -> str:
        """Return the name that errors give a parameter."""
        return self._labels.get(name, name)

    def has(self, name: str) -> bool:
        """Return whether the request gives it."""
        return name in self._values

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number. Raises ContractError."""
        return to_whole(self.label(name), self._values.get(name, default))

    def value(self, name: str) -> object:
        """Return a parameter as it came; None where it is not given."""
        return self._values.get(name)

    def whole_or_none(self, name: str) -> int | None:
        """Return a whole number; None where it is not given. Raises ContractError."""
        return to_whole(self.label(name), self._values[name]) if name in self._values else None

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number. Raises ContractError."""
        return to_number(self.label(name), self._values.get(name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false. Raises ContractError."""
        return to_flag(self.label(name), self._values.get(name, default))

    def text(self, name: str) -> str:
        """Read a text, empty where there is none."""
        return decode(name, self._values.get(name, ""))

    def words(self, name: str, most_bytes: int) -> tuple[str, ...]:
        """Read a text or a list of texts, at most `most_bytes` together, none empty."""
        value, name = self._values.get(name, []), self.label(name)
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ContractError(f"{name} is {clip(value)}, neither a text nor a list of texts")
        limits.check_count(name, len(items), limits.MAX_WORDS, "words")
        words = tuple(decode(f"{name}[{i}]", item) for i, item in enumerate(items))
        if "" in words:
            raise ContractError(f"{name}[{words.index('')}] is empty")
        limits.check_word_bytes(name, [word.encode() for word in words], most_bytes)
        return words

    def guide(self) -> Guide | None:
        """Return what the output must be; None: anything. Raises ContractError."""
        return vllm_guide(self._values)

    def edits(self) -> dict[str, Any]:
        """Return fields of `SamplingParams` that edit logits. Raises ContractError."""
        return vllm_edits(self._values)

    def ids(self, name: str) -> tuple[int, ...]:
        """Read a list of token ids."""
        items = self._values.get(name, [])
        if not isinstance(items, list):
            raise ContractError(f"{name} is {clip(items)}, not a list of token ids")
        limits.check_count(name, len(items), limits.MAX_WORDS, "token ids")
        return tuple(
            limits.check_whole(f"{name}[{i}]", to_whole(f"{name}[{i}]", item), 0)
            for i, item in enumerate(items)
        )

    def bias(self, name: str) -> tuple[tuple[int, float], ...]:
        """Read an object: token id -> what is added to its logit."""
        items = self._values.get(name, {})
        if not isinstance(items, dict):
            raise ContractError(f"{name} is {clip(items)}, not an object of token ids and numbers")
        limits.check_count(name, len(items), limits.MAX_BIASED_TOKENS, "token ids")
        bias: dict[int, float] = {}
        for key, weight in items.items():
            token_id = limits.check_whole(f"{name} key", to_whole(f"{name} key", key), 0)
            field = f"{name} of token {token_id}"
            if token_id in bias:
                raise ContractError(f"{field} is given twice")
            bias[token_id] = limits.check_number(
                field, to_number(field, weight), -limits.VLLM_MAX_BIAS, limits.VLLM_MAX_BIAS
            )
        return tuple((token_id, weight) for token_id, weight in sorted(bias.items()) if weight)


def _parameters(read: Inputs, parameters: Mapping[str, object]) -> Values:
    """Read the sampling parameters, from the tensor or from the request, with known names only."""
    asked = {name: value for name, value in parameters.items() if not is_triton_parameter(name)}
    if read.has("sampling_parameters"):
        values = _object(read.text("sampling_parameters"))
        _check_beside(asked, values)
        asked = values
    return read_values(asked)


def _check_beside(asked: Mapping[str, object], values: Mapping[str, object]) -> None:
    """Raise ContractError for a request parameter unless the tensor says the same.

    The example client of vllm_backend sends its parameters in both.
    """
    most, given = openai_names.split_openai(asked)
    if most is not None:
        given[openai_names.MAX_COMPLETION_TOKENS] = most
    for name, value in given.items():
        if name not in values or _neutral_form(value) != _neutral_form(values[name]):
            there = clip(values[name]) if name in values else "missing"
            raise ContractError(
                f"request parameter {clip(name)} beside sampling_parameters: it is {clip(value)}, "
                f"but {there} there"
            )


def read_values(
    asked: Mapping[str, object], labels: Mapping[str, str] = MappingProxyType({})
) -> Values:
    """Return vLLM's parameters, OpenAI's names among them, if all names are known.

    Raises ContractError.
    """
    most, given = openai_names.split_openai(asked)
    for name, value in given.items():
        if name in _LATER:
            if _neutral_form(value) not in _LATER[name]:
                served = [each for each in _LATER[name] if isinstance(each, int)]
                raise refuse_unsupported(labels.get(name, name), value, served)
        elif name in _OF_ENGINE:
            if value is not None:
                raise ContractError(
                    f"{labels.get(name, name)} is {clip(value)}: a request cannot choose it, the "
                    "engine is started with it (slipstream compose --speculation)"
                )
        elif name not in _SERVED:
            raise refuse_parameter(name, known_names() - frozenset(_OF_ENGINE))
    if given.get("max_tokens") is None and most is not None:  # no default below the bound given
        return Values(given | {"max_tokens": most}, None, labels)
    return Values(given, most, labels)


def _options(read: Inputs, values: Values) -> ResponseOptions:
    options = ResponseOptions(**read_fields(ResponseOptions, "vllm", read))
    is_excluded = read.flag("exclude_input_in_output", options.is_streaming)
    skip_special_tokens = values.flag("skip_special_tokens", True)
    return msgspec.structs.replace(
        options, echo=not is_excluded, skip_special_tokens=skip_special_tokens
    )


def _add_special_tokens(read: Inputs, values: Values) -> bool | None:
    """Return the input, or the parameter of its name; None where neither is given."""
    name = "add_special_tokens"
    if not values.has(name):
        return read.flag_or_none(name)
    if read.has(name):
        raise ContractError(f"{name} is given as an input and as a parameter; one is enough")
    return values.flag(name)


def _object(text: str) -> dict[str, object]:
    """Parse JSON. An empty text asks for nothing."""
    limits.check_count("sampling_parameters", len(text.encode()), limits.MAX_JSON_BYTES, "bytes")
    try:
        value = json.loads(text, object_pairs_hook=_without_twins) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ContractError(f"sampling_parameters is not JSON: {_fault(error)}") from None
    if not isinstance(value, dict):
        raise ContractError(f"sampling_parameters is {clip(value)}, not a JSON object")
    return value


def _fault(error: Exception) -> str:
    """Describe what is wrong with a JSON, without Python's words about Python."""
    if isinstance(error, json.JSONDecodeError):
        start = error.doc[error.pos : error.pos + 65]
        return f"{error.msg} at character {error.pos}: {clip(start)}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"it has a number of more than {sys.get_int_max_str_digits()} digits"


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value: dict[str, object] = {}
    for name, item in pairs:
        if name in value:
            raise ContractError(f"sampling_parameters has {clip(name)} twice")
        value[name] = item
    return value


def _neutral_form(value: object) -> object:
    """Return the value of a request parameter, which may be the text `false` or `1`."""
    if isinstance(value, str):
        return {"false": False, "true": True, "none": None}.get(value.lower(), _number(value))
    return value


def _number(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _sampling(values: Values) -> SamplingParams:
    chosen = normalised(read_fields(SamplingParams, "vllm", values), values.most_tokens)
    chosen |= _best_of(values, chosen)
    if chosen["temperature"] == 0.0 and chosen.get("beams") is None:
        chosen = greedy(chosen)
    chosen["top_k"] = max(0, chosen["top_k"])
    return SamplingParams(
        **chosen | {"seed": _seed(chosen["seed"])},
        stop_token_ids=values.ids("stop_token_ids"),
        stop_words=tuple(w.encode() for w in values.words("stop", limits.MAX_STOP_BYTES)),
        bias=values.bias("logit_bias"),
        guide=values.guide(),
        **values.edits(),
    )


def _best_of(values: Values, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return what a beam search, or a choice of the best samples, makes of the parameters."""
    n, best_of = chosen["n"], chosen["best_of"] or chosen["n"]
    if (beams := vllm_beams(values, n, best_of)) is not None:
        filters = without_neutral(
            {**chosen, "top_k": max(0, chosen["top_k"])}, _UNFILTERED, _UNFILTERED
        )
        heat = chosen["temperature"]
        own = {"beams": beams, "best_of": None, "temperature": 0.0 if heat == 1.0 else heat}
        return {**filters, **own}
    if best_of < n:
        raise ContractError(f"best_of is {best_of}, below n, which is {n}")
    return {"best_of": best_of if best_of > n else None}


def _seed(seed: int | None) -> int | None:
    """Read a seed. None and -1: a random one. Negative ones are 64-bit patterns, like vLLM's."""
    if seed is None or seed == -1:
        return None
    return int(np.array(seed, np.int64).astype(np.uint64))


def _log_probs(values: Values, are_sent: bool) -> LogProbs | None:
    """Return what is wanted beside the tokens; `are_sent`: of the sampled ones at least."""
    mode = values.text("logprobs_mode")
    prompt = values.whole_or_none("prompt_logprobs")
    # OpenAI's flag, cast as vllm_backend does: Triton's frontend sends it with each chat.
    flag = values.value("logprobs")
    top = int(flag) if isinstance(flag, bool) else values.whole_or_none("logprobs")
    for name, number in (("logprobs", top), ("prompt_logprobs", prompt)):
        if number is not None:
            check_num_top(name, number)
    if mode:
        check_mode(mode)
    if not are_sent:
        top = None
    elif top is None:
        top = 0
    return None if top is None and prompt is None else LogProbs(top=top, prompt=prompt, mode=mode)
