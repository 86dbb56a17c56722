"""Write for operators: a status line every 10 s, and a line for each request if configured.

A line of the request log is JSON in ASCII, with control characters escaped. It has lengths, times
and reasons, never content of the prompt or the output.
"""

import datetime
import json
import logging
import logging.handlers
import time
from collections.abc import Iterable
from pathlib import Path

from slipstream.core.sequence import Request, Sequence
from slipstream.engine.telemetry import Telemetry
from slipstream.wire import Status

_log = logging.getLogger(__name__)

_EVERY_S = 10.0
_MAX_ID = 64  # characters of what a client chose


class StatusLine:
    """Logs the state of the engine every 10 s, unless it was idle."""

    def __init__(self, now_s: float) -> None:
        """Start the first period; `now_s` is a `time.monotonic()`."""
        self._last_s = now_s
        self._before = (0, 0, 0, 0, 0)

    def tick(self, status: Status, now_s: float) -> None:
        """Log if the period is over; call this about once a second."""
        if now_s - self._last_s < _EVERY_S:
            return
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        before = self._before
        now = (
            status.num_output_tokens,
            status.num_prompt_tokens,
            status.num_preemptions,
            status.num_prefix_queries,
            status.num_prefix_hits,
        )
        self._before = now
        if not (status.running or status.waiting or now != before):
            return
        counts = (new - old for new, old in zip(now, before, strict=True))
        outputs, prompts, preemptions, queries, hits = counts
        used = 1 - status.kv_blocks_free / status.kv_blocks_total
        _log.info(
            "%d running, %d waiting, KV cache %.1f %% used, %.1f tok/s generated, "
            "%.1f tok/s of prompts, %.1f %% of prompts found in the cache, %d preemptions",
            status.running,
            status.waiting,
            100 * used,
            outputs / elapsed_s,
            prompts / elapsed_s,
            100 * hits / max(1, queries),
            preemptions,
        )


class RequestLog:
    """A file with a line for every request that has ended."""

    def __init__(self, path: Path, telemetry: Telemetry) -> None:
        """Open the file for appending; raises OSError. It may be rotated at any time."""
        self._telemetry = telemetry
        self._log = logging.Logger("requests")
        handler = logging.handlers.WatchedFileHandler(path, encoding="ascii")
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._log.addHandler(handler)

    def write(self, request: Request) -> None:
        """Append a request whose sequences have all ended."""
        line = describe(request, self._telemetry, time.monotonic_ns())
        self._log.info("%s", json.dumps(line, ensure_ascii=True))


def describe(request: Request, telemetry: Telemetry, now_ns: int) -> dict[str, object]:
    """Return the log entry of a request that ended at `now_ns`, a `time.monotonic_ns()`.

    Times are in s since the request's arrival; null: it did not get that far.
    """
    sequences = request.sequences
    started = [each.first_scheduled_ns for each in sequences if each.first_scheduled_ns]
    first = [each.first_token_ns for each in sequences if each.first_token_ns]
    arrival_ns = request.message.arrival_ns
    moment = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
    return {
        "time": moment.isoformat(timespec="milliseconds"),
        "id": request.message.request_id[:_MAX_ID],
        "model": request.message.model[:_MAX_ID],
        "lora_name": request.message.adapter[:_MAX_ID],
        "adapter": None if request.adapter is None else request.adapter.digest.hex(),
        "priority": request.message.priority,
        "num_input_tokens": sequences[0].num_prompt,
        "max_tokens": request.sampling.max_tokens,
        "num_output_tokens": [each.length for each in sequences],
        "finish_reasons": [each.ending.reason if each.ending else None for each in sequences],
        "cancel_cause": request.cause,
        "queue_s": _seconds(min(started) - arrival_ns) if started else None,
        "first_token_s": _seconds(min(first) - arrival_ns) if first else None,
        "first_token_wait_s": _first_parts(sequences),
        "end_to_end_s": _seconds(now_ns - arrival_ns),
        "num_preemptions": sum(each.num_preemptions for each in sequences),
        "device_s": round(sum(each.device_s for each in sequences), 6),
        "cost": sum(map(telemetry.cost, sequences)),
    }


def _first_parts(sequences: Iterable[Sequence]) -> dict[str, float] | None:
    """Return what the first of all first tokens waited for, by `figures.FIRST_TOKEN_PARTS`."""
    started = [each for each in sequences if each.first_token_ns and each.first_wait is not None]
    if not started:
        return None
    wait = min(started, key=lambda each: each.first_token_ns).first_wait
    assert wait is not None
    return {name: round(seconds, 6) for name, seconds in (wait.parts_s or {}).items()}


def _seconds(duration_ns: int) -> float:
    return round(max(0, duration_ns) / 1e9, 6)
