"""Figures of a bridge on the server's metrics endpoint, brought up to date once a second.

Every operation on a metric is a round trip to the server, so one thread does them in a batch.
"""

import logging
import threading
from typing import Any

import triton_python_backend_utils as pb

from slipstream import wire
from slipstream.bridge.bridge import Bridge

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_BUCKETS_S = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
_COUNTERS = {
    "slipstream_requests": "Requests begun",
    "slipstream_tokens": "Tokens generated",
    "slipstream_dropped_streams": "Streams ended because postprocessing met a client that is gone",
}
_ENGINE_GAUGES = {
    "running": "Sequences that the engine generates",
    "waiting": "Sequences that wait in the engine",
    "kv_blocks_free": "Blocks of the KV cache that no sequence uses",
    "kv_blocks_total": "Blocks of the KV cache",
    "num_preemptions": "Sequences put back to waiting for lack of blocks, since the engine began",
    "num_steps": "Steps since the engine began",
}


class Metrics:
    """The thread, and the metrics of one model. `tells_engine`: also those of the engine."""

    def __init__(self, bridge: Bridge, model: str, tells_engine: bool) -> None:
        """Raises what the server says, where it serves no metrics."""
        self._bridge = bridge
        self._families: list[Any] = []  # a family that is collected takes its metrics along
        labels = {"model": model}
        if tells_engine:
            self._gauges = {
                field: self._make(f"slipstream_{field}", text, pb.MetricFamily.GAUGE, {})
                for field, text in _ENGINE_GAUGES.items()
            }
        else:
            self._gauges = {}
            self._counters = {
                name: self._make(name, text, pb.MetricFamily.COUNTER, labels)
                for name, text in _COUNTERS.items()
            }
            self._counts = dict.fromkeys(_COUNTERS, 0)
            self._first_token = self._make(
                "slipstream_first_token_seconds",
                "From a streaming request to its first response",
                pb.MetricFamily.HISTOGRAM,
                labels,
                buckets=_BUCKETS_S,
            )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _make(self, name: str, text: str, kind: Any, labels: dict[str, str], **more: Any) -> Any:
        family = pb.MetricFamily(name=name, description=text, kind=kind)
        self._families.append(family)
        return family.Metric(labels=labels, **more)

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            try:
                if self._gauges:
                    self._tell_engine(self._bridge.connection.status)
                else:
                    self._tell_calls()
            except Exception:
                _log.exception("metrics failed")

    def _tell_engine(self, status: wire.Status | None) -> None:
        if status is not None:
            for field, gauge in self._gauges.items():
                gauge.set(float(getattr(status, field)))

    def _tell_calls(self) -> None:
        calls = self._bridge.calls
        now = (calls.num_calls, calls.num_tokens, self._bridge.flow.num_cancelled)
        for name, count in zip(_COUNTERS, now, strict=True):
            if count > self._counts[name]:
                self._counters[name].increment(count - self._counts[name])
                self._counts[name] = count
        for seconds in calls.take_first_token_times():
            self._first_token.observe(seconds)
