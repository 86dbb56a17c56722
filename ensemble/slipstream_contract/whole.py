"""Marks of a whole answer over HTTP, where the end of the connection says nothing.

A tritonserver whose HTTP thread cannot write loses the last events of streams, an error
among them, and ends them in good order all the same (docs/faults.md). Events that do come are in
order. So an answer is whole if the event is there that only its end brings: a reason, or the times
of the whole answer.
"""

from collections.abc import Mapping

from slipstream_contract.deployment import role_of

CUT = "the answer ended without its last event"
RUNNING = "None"  # as Triton's vLLM backend writes a reason that is not there yet


def mark_of(model: str) -> dict[str, object]:
    """Return what a request to that model asks for, so that its last event differs from others."""
    is_vllm = role_of(model) == "vllm_model"
    name = "return_finish_reason" if is_vllm else "return_perf_metrics"
    return {name: True}


def is_last(event: Mapping[str, object]) -> bool:
    """Return whether an event ends a sequence; each sequence of an answer has such an event."""
    return has_ended(event.get("last_token_time_ns"), event.get("finish_reason", RUNNING))


def has_ended(last_token_time_ns: object, finish_reason: object) -> bool:
    """Return whether these two fields of an event end a sequence; None: no time is there."""
    return last_token_time_ns is not None or finish_reason != RUNNING
