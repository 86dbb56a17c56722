"""Request inputs for the KV cache: how long to keep its blocks, and which requests share them.

Blocks have priorities as in TensorRT-LLM: the lowest go first. A block belongs to the range that
its first token is in; outside of all ranges, it has the usual one. Where `cache_salt` differs, a
request parameter of every model, nothing is shared.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import msgspec

from slipstream_contract.errors import ContractError, clip
from slipstream_contract.fields import BOTH, Field, Row
from slipstream_contract.limits import (
    INT32_MAX,
    MAX_RANGES,
    MAX_RETENTION,
    MAX_SALT_BYTES,
    check_count,
    check_whole,
)

DEFAULT_RETENTION = 35
SALT_ROW = Row("`cache_salt`, bytes", 0, MAX_SALT_BYTES, BOTH)

_SALT = "cache_salt"
_RANGE = "retention_token_range_"
_FIELDS = ("starts", "ends", "priorities", "durations_ms")


class TokenRange(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start .. end - 1` of the prompt; an `end` of -1 is the prompt's."""

    start: int
    end: int
    priority: int
    duration_ms: int = -1  # then, counted from its last use, the usual priority; -1: for ever


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """Retention of a request's blocks; `decode_priority` is that of the output."""

    ranges: Annotated[
        tuple[TokenRange, ...],
        Field(
            "priorities of the prompt's blocks; in order, none of them over another",
            rows=(
                Row("`retention_token_range_starts`: ranges", 0, MAX_RANGES, BOTH),
                Row(
                    "`retention_token_range_priorities`, `retention_decode_priority`",
                    0,
                    MAX_RETENTION,
                    BOTH,
                ),
                Row(
                    "`..._durations_ms`, `retention_decode_duration_ms`",
                    "1, or -1",
                    INT32_MAX,
                    BOTH,
                ),
            ),
        ),
    ] = ()
    decode_priority: int = DEFAULT_RETENTION
    decode_duration_ms: int = -1

    def of(self, token: int, num_prompt: int) -> tuple[int, int] | None:
        """Return priority and ms (-1: for ever) of the block that begins with this token.

        None: nothing is said of it.
        """
        if token >= num_prompt:
            return self.decode_priority, self.decode_duration_ms
        place = bisect_right(self.ranges, token, key=lambda each: each.start) - 1
        if place >= 0:
            found = self.ranges[place]
            if found.end == -1 or token < found.end:
                return found.priority, found.duration_ms
        return None


class _Inputs(Protocol):
    def has(self, name: str) -> bool: ...
    def array(self, name: str) -> Any: ...
    def whole(self, name: str, default: int | None = None) -> int: ...


def read_retention(read: _Inputs) -> Retention | None:
    """Read the `retention_*` inputs; None if they say nothing. Raises ContractError."""
    columns = {field: _numbers(read, _RANGE + field) for field in _FIELDS}
    size = len(columns["starts"])
    if not columns["durations_ms"]:
        columns["durations_ms"] = [-1] * size
    for field, numbers in columns.items():
        if len(numbers) != size:
            raise ContractError(
                f"{_RANGE}{field} has {len(numbers)} values for {size} {_RANGE}starts"
            )
    decode = tuple(f"retention_decode_{field}" for field in ("priority", "duration_ms"))
    if not size and not any(map(read.has, decode)):
        return None
    priority, duration_ms = read.whole(decode[0], DEFAULT_RETENTION), read.whole(decode[1], -1)
    ranges = tuple(map(TokenRange, *columns.values()))
    retention = Retention(ranges, priority, duration_ms)
    check_retention(retention)
    return retention


def _numbers(read: _Inputs, name: str) -> list[int]:
    array = read.array(name)
    return [] if array is None else [int(number) for number in array.reshape(-1)]


def check_retention(retention: Retention) -> None:
    """Check ranges and priorities for what the cache can do. Raises ContractError."""
    check_count(f"{_RANGE}starts", len(retention.ranges), MAX_RANGES, "ranges")
    last_end = 0
    for i, each in enumerate(retention.ranges):
        if last_end == -1:
            raise ContractError(f"{_RANGE}ends[{i - 1}] is -1, which only the last one may be")
        check_whole(f"{_RANGE}starts[{i}]", each.start, last_end)
        if each.end != -1:
            check_whole(f"{_RANGE}ends[{i}]", each.end, each.start + 1)
        check_whole(f"{_RANGE}priorities[{i}]", each.priority, 0, MAX_RETENTION)
        _check_duration(f"{_RANGE}durations_ms[{i}]", each.duration_ms)
        last_end = each.end
    check_whole("retention_decode_priority", retention.decode_priority, 0, MAX_RETENTION)
    _check_duration("retention_decode_duration_ms", retention.decode_duration_ms)


def _check_duration(field: str, duration_ms: int) -> None:
    if duration_ms != -1 and not 1 <= duration_ms <= INT32_MAX:
        raise ContractError(
            f"{field} is {clip(duration_ms)}, neither -1 (for ever) nor from 1 to {INT32_MAX}"
        )


def split_salt(parameters: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Return `cache_salt`, empty if not given, and the others. Raises ContractError."""
    others = dict(parameters)
    salt = others.pop(_SALT, "")
    if not isinstance(salt, str):
        raise ContractError(f"{_SALT} is {clip(salt)}, not a text")
    check_salt(salt)
    return salt, others


def check_salt(salt: str) -> None:
    """Check a salt's length. Raises ContractError."""
    try:
        size = len(salt.encode())
    except UnicodeEncodeError:
        raise ContractError(f"{_SALT} is {clip(salt)}, which has no form in UTF-8") from None
    check_count(_SALT, size, MAX_SALT_BYTES, "bytes")
