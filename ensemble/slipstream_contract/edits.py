"""Fields that edit logits, as far as a schema has them in a way of its own: lists and objects.

Where a field is a request parameter or a text, its list or object comes as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

from slipstream_contract import limits
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.guide import parse_json
from slipstream_contract.inputs import Inputs, to_whole

_NGRAM, _ALLOWED = "no_repeat_ngram_size", "allowed_token_ids"
_BREAKERS, _PROCESSORS = "dry_sequence_breakers", "logits_processors"


def trtllm_edits(read: Inputs) -> dict[str, Any]:
    """Return fields of `SamplingParams` of a request in TensorRT-LLM's tensors.

    Lists of a batch may be padded: token ids with -1, words with empty ones. Raises ContractError.
    """
    size = read.whole(_NGRAM, 0)
    if size != limits.NGRAM_OFF:
        limits.check_whole(read.label(_NGRAM), size, 0, limits.MAX_NGRAM)
    found: dict[str, Any] = {_NGRAM: 0 if size == limits.NGRAM_OFF else size}
    if (ids := read.array(_ALLOWED)) is not None:
        found[_ALLOWED] = allowed_ids([token_id for token_id in ids.tolist() if token_id != -1])
    if read.has(_BREAKERS):
        found[_BREAKERS] = breakers([word for word in read.texts(_BREAKERS) if word])
    if read.has(_PROCESSORS) and (text := read.text(_PROCESSORS)):
        found[_PROCESSORS] = processors(text)
    return found


def vllm_edits(values: Mapping[str, object]) -> dict[str, Any]:
    """Return fields of `SamplingParams` among vLLM's parameters. Raises ContractError."""
    found: dict[str, Any] = {}
    for name, made in ((_ALLOWED, allowed_ids), (_BREAKERS, breakers), (_PROCESSORS, processors)):
        if values.get(name) is not None:
            found[name] = made(values[name])
    return found


VLLM_NAMES = frozenset({_ALLOWED, _BREAKERS, _PROCESSORS})
"""Names among vLLM's parameters that `vllm_edits` reads."""


def _decoded(field: str, value: object) -> object:
    """Return a value that may come as its JSON. Raises ContractError."""
    if not isinstance(value, str):
        return value
    limits.check_count(field, len(value.encode(errors="replace")), limits.MAX_JSON_BYTES, "bytes")
    return parse_json(field, value)


def allowed_ids(value: object) -> tuple[int, ...]:
    """Return the token ids of `allowed_token_ids`, each once. Raises ContractError."""
    items = _decoded(_ALLOWED, value)
    if not isinstance(items, list):
        raise ContractError(f"{_ALLOWED} is {clip(items)}, not a list of token ids")
    limits.check_count(_ALLOWED, len(items), limits.MAX_ALLOWED_IDS, "token ids")
    if not items:
        raise ContractError(f"{_ALLOWED} is empty, so that no token is left")
    ids = (
        limits.check_whole(f"{_ALLOWED}[{i}]", to_whole(f"{_ALLOWED}[{i}]", item), 0)
        for i, item in enumerate(items)
    )
    return tuple(dict.fromkeys(ids))


def breakers(value: object) -> tuple[bytes, ...]:
    """Return the words of `dry_sequence_breakers`. Raises ContractError."""
    items = _decoded(_BREAKERS, value)
    if not isinstance(items, list):
        raise ContractError(f"{_BREAKERS} is {clip(items)}, not a list of texts")
    limits.check_count(_BREAKERS, len(items), limits.MAX_BREAKERS, "words")
    return tuple(_breaker(f"{_BREAKERS}[{i}]", item) for i, item in enumerate(items))


def _breaker(field: str, item: object) -> bytes:
    if not isinstance(item, str):
        raise ContractError(f"{field} is {clip(item)}, not a text")
    try:
        data = item.encode()
    except UnicodeEncodeError:
        raise ContractError(f"{field} is not valid UTF-8: {clip(item)}") from None
    if not data:
        raise ContractError(f"{field} is empty")
    limits.check_count(field, len(data), limits.MAX_BREAKER_BYTES, "bytes")
    return data


def processors(value: object) -> tuple[tuple[str, str], ...]:
    """Return names and arguments in JSON of `logits_processors`. Raises ContractError."""
    items = _decoded(_PROCESSORS, value)
    if items == []:  # vLLM's value without effect
        return ()
    if not isinstance(items, dict):
        raise ContractError(f"{_PROCESSORS} is {clip(items)}, not an object of names and arguments")
    limits.check_count(_PROCESSORS, len(items), limits.MAX_PROCESSORS, "names")
    return tuple((name, _arguments(name, item)) for name, item in items.items())


def _arguments(name: str, value: object) -> str:
    field = f"{_PROCESSORS}.{name[:64]}"
    if not isinstance(value, dict):
        raise ContractError(f"{field} is {clip(value)}, not an object of arguments")
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        raise ContractError(f"{field} is no JSON, or is nested too deeply") from None
    limits.check_count(field, len(text), limits.MAX_PROCESSOR_BYTES, "bytes")
    return text
