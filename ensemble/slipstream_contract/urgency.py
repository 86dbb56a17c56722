"""Deadline and priority of a request: request parameters of every model.

`timeout_ms`, and Triton's own `timeout` in microseconds, count from the moment the generating model
has the request; the shorter one holds. `priority` is 0 (first) to 9 among requests that wait. A
server takes a gRPC parameter of that name for its own queue and does not pass it on, so over gRPC
it is called `request_priority`.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from slipstream_contract.errors import ContractError
from slipstream_contract.fields import BOTH, MODEL, Field, Row
from slipstream_contract.inputs import to_whole
from slipstream_contract.limits import LOWEST_PRIORITY as LOWEST_PRIORITY
from slipstream_contract.limits import MAX_TIMEOUT_MS, check_whole

DEFAULT_PRIORITY = 5

_PRIORITY, _GRPC_PRIORITY = "priority", "request_priority"
_TIMEOUT_MS, _TIMEOUT_US = "timeout_ms", "timeout"
_NAMES = frozenset({_PRIORITY, _GRPC_PRIORITY, _TIMEOUT_MS, _TIMEOUT_US})


class Urgency(msgspec.Struct, frozen=True):
    """Deadline and priority of one request."""

    timeout_ns: Annotated[
        int,
        Field(
            "how long waiting and generating together may take; 0: for ever",
            rows=(
                Row("`timeout_ms`", 1, MAX_TIMEOUT_MS, MODEL),
                Row("`timeout`, microseconds", 0, 1000 * MAX_TIMEOUT_MS, MODEL),
            ),
        ),
    ] = 0
    priority: Annotated[
        int,
        Field(
            "who is admitted first of those that wait: 0",
            rows=(Row("`priority`, `request_priority`", 0, LOWEST_PRIORITY, BOTH),),
        ),
    ] = DEFAULT_PRIORITY


def split_urgency(parameters: Mapping[str, object]) -> tuple[Urgency, dict[str, object]]:
    """Return the urgency of a request, and its other parameters. Raises ContractError."""
    own = {name: parameters[name] for name in _NAMES & parameters.keys()}
    others = {name: value for name, value in parameters.items() if name not in own}
    timeouts_us = []
    if _TIMEOUT_MS in own:
        timeouts_us.append(1000 * _whole(own, _TIMEOUT_MS, 1, MAX_TIMEOUT_MS))
    own.setdefault(_TIMEOUT_US, 0)
    if timeout_us := _whole(own, _TIMEOUT_US, 0, 1000 * MAX_TIMEOUT_MS):
        timeouts_us.append(timeout_us)
    if _PRIORITY in own and _GRPC_PRIORITY in own:
        raise ContractError(
            f"{_PRIORITY} and {_GRPC_PRIORITY} are given but mean the same; one is enough"
        )
    priority = DEFAULT_PRIORITY
    for name in (_PRIORITY, _GRPC_PRIORITY):
        if name in own:
            priority = _whole(own, name, 0, LOWEST_PRIORITY)
    return Urgency(1000 * min(timeouts_us, default=0), priority), others


def _whole(own: Mapping[str, object], name: str, low: int, high: int) -> int:
    return check_whole(name, to_whole(name, own[name]), low, high)
