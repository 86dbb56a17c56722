"""Sampling parameters of `generation_config.json`: what requests get that do not say, as in vLLM.

A value that is out of bounds is refused when the file is read, not once a request: null and a
`top_k` of 0 or -1 say nothing. Where `do_sample` is false transformers reads none of the values by
which it samples, so that those it could not use are none; vLLM reads the others.
"""

import json
from math import inf
from pathlib import Path
from sys import float_info
from typing import Any

from slipstream_contract.errors import ContractError, clip
from slipstream_contract.fields import Asked, Entry, table
from slipstream_contract.sampling import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_UNREAD_IF_GREEDY = ("temperature", "top_p", "top_k", "min_p")


def read_defaults(checkpoint: Path) -> dict[str, float]:
    """Return the sampling parameters that a checkpoint's file has, by name; none without a file.

    Raises ContractError, which names file, key, value and bounds.
    """
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        given = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ContractError(f"{path}: must be a JSON object, not {clip(given)}")
    found: dict[str, float] = {}
    for name in NAMES:
        if given.get(name) is None:
            continue
        try:
            found[name] = _value(path, name, given[name])
        except ContractError:
            if given.get("do_sample") is not False or name not in _UNREAD_IF_GREEDY:
                raise
    return found


def _value(path: Path, name: str, value: Any) -> float:
    """Return a value that the vLLM schema serves. Raises ContractError."""
    entry: Entry = table(SamplingParams)[name]
    asked: Asked | None = entry.asked("vllm")
    assert asked is not None, "it is a plain number of that schema"
    assert asked.bounds is not None, "a number has bounds"
    label = f"{path}: {name}"
    kinds = int if entry.kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
        what = "a whole number" if entry.kind is int else "a number"
        raise ContractError(f"{label} is {clip(value)}, not {what} {asked.bounds}")
    if entry.kind is float and abs(value) > float_info.max:  # a whole number that no float holds
        value = inf
    checked: float = asked.bounds.check(label, value, entry.kind)
    return checked
