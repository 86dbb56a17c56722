"""What is wrong with what came of a fuzzed request: its end, its status, its error."""

import json
from collections.abc import Iterator
from typing import Any

from fuzz_cases import ANY, Case
from fuzz_send import NO_END, Outcome, is_stream
from slipstream_serve.server import repository_root

LONGEST_QUOTE = 64  # characters of a value in an error; see `clip` of the contract
_APART = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")  # a series of responses a sequence
_NEVER = ("Traceback", 'File "', "INTERNAL:", "could not be started", "failed to process", ".py")
_CODES = ("INVALID_ARGUMENT: ", "NOT_FOUND: ")  # of all that the server itself does not refuse
_ANSWERED, _REFUSED, _NO_JSON = "200", "400", "500"  # of HTTP: see docs/clients.md
_NO_STEP = "generate expects model to produce exactly 1 response"  # so says tritonserver


def judge(case: Case, outcome: Outcome) -> str:
    """What is wrong with an outcome; nothing where it is as it must be."""
    error = outcome.error
    if any(word in error for word in _NEVER) or str(repository_root()) in error:
        return f"says too much, or is internal: {error[:300]}"
    if quote := long_quote(case, error):
        return f"quotes {len(quote)} characters of a value and more: {error[:300]}"
    if not error.startswith(NO_END) and outcome.status not in statuses(case, outcome):
        return f"has status {outcome.status!r}: {error[:300]}"
    if case.mutation is not None:  # the server drops what is no message without a word
        return error if error.startswith(NO_END) else ""
    if not outcome.is_whole:
        return f"has no end: {error[:300]}"
    if case.is_stop and not case.faults:
        return ""
    if case.faults:
        return _refusal(case, outcome)
    if error:
        return f"was refused: {error[:300]}"
    least = case.size * case.num_sequences if case.model in _APART else 1
    return "" if len(outcome.responses) >= least else "has too few responses"


def _refusal(case: Case, outcome: Outcome) -> str:
    error = outcome.error
    if not error and case.model == "ensemble" and not outcome.responses and ANY in case.faults:
        return ""  # without a required tensor no step begins, and the server ends it so
    if not error:
        return "was served"
    if not any(name in error for names in case.faults for name in names):
        return f"is refused, but not by name: {error[:300]}"
    if ANY not in case.faults and not any(code in error for code in _CODES):
        return f"is refused, but without a code: {error[:300]}"
    return f"has an error of {len(error)} characters" if len(error) > 800 else ""


def statuses(case: Case, outcome: Outcome) -> tuple[str, ...]:
    """Return the statuses that an outcome may have.

    A gRPC stream of tritonserver's ends with OK whatever its responses say: an error is a text in
    one of them. HTTP has sent its status once a stream has begun.
    """
    if case.wire == "grpc":
        return ("OK",)
    if not outcome.error:
        return (_ANSWERED,)
    is_changed = case.mutation is not None
    if is_changed and case.model == "ensemble" and outcome.error.startswith(_NO_STEP):
        return (_ANSWERED,)
    begun = (_ANSWERED,) if is_stream(case) and outcome.responses else ()
    return (_REFUSED, *begun, *([_NO_JSON] if is_changed else []))


def long_quote(case: Case, error: str) -> str:
    """More of a value than an error may hold, as it was sent or as Python writes it."""
    windows = [
        error[at : at + LONGEST_QUOTE + 1] for at in range(max(len(error) - LONGEST_QUOTE, 0))
    ]
    if not windows:
        return ""
    for value in long_values(case):
        for window in windows:
            if window in value:
                return window
    return ""


def long_values(case: Case) -> Iterator[str]:
    """What was sent, and is too long to be quoted, in every form that an error could hold."""
    values: list[Any] = [case.request_id, *case.parameters, *case.parameters.values()]
    for tensor in case.tensors:
        values += [tensor.elements, *tensor.elements]
        if tensor.name == "sampling_parameters":
            values += _inner(tensor.elements[0])
    for value in values:
        plain = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for text in {plain, repr(value)}:
            if len(text) > LONGEST_QUOTE:
                yield text


def _inner(raw: bytes) -> list[Any]:
    """What is in a JSON object: names, values, and what is in those."""
    try:
        asked = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    if not isinstance(asked, dict):
        return [asked]
    found = [*asked, *asked.values()]
    for value in asked.values():
        if isinstance(value, list | dict):
            found += value
    return found
