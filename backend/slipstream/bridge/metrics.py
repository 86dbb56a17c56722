"""Publish figures on the server's metrics endpoint, once a second.

Every operation on a metric is a round trip to the server of some 30 us, so one thread does them in
a batch, and only for values that have changed. The server cannot add many values to a histogram at
once, and there are as many inter-token times as tokens. So histograms that grow with the load are
published as counters: `_bucket` with the label `le`, `_sum` and `_count`, which is all that
Prometheus keeps of a histogram.
"""

import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import triton_python_backend_utils as pb
from slipstream_contract.deployment import split_name
from slipstream_contract.errors import REASONS, ContractError, label_of
from slipstream_runtime import repairs
from slipstream_runtime.stub import must_end

from slipstream import wire
from slipstream.bridge.bridge import Bridge
from slipstream.bridge.families import (
    Kind,
    Metric,
    engine_metrics,
    replica_metrics,
    replica_values,
)
from slipstream.bridge.periodic import Periodic
from slipstream.bridge.totals import Totals, Values
from slipstream.figures import HISTOGRAMS

_PERIOD_S = 1.0
_ANSWER_S = 1.0
_BUCKETS_S = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]


class _Families:
    """The server's metric families, each made once: a collected family takes its metrics along."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        self._gauges: set[str] = set()  # names of families

    def make(self, name: str, text: str, kind: Any, labels: dict[str, str], **more: Any) -> Any:
        """Return a metric; the server's own one if it has that already."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = pb.MetricFamily(name=name, description=text, kind=kind)
        return family.Metric(labels=labels, **more)

    def gauge(self, name: str, text: str, labels: dict[str, str]) -> Callable[[float], None]:
        """Return a function that sets a gauge."""
        metric = self.make(name, text, pb.MetricFamily.GAUGE, labels)
        self._gauges.add(name)
        published: float | None = None

        def publish(value: float) -> None:
            nonlocal published
            if value != published:
                metric.set(float(value))
                published = value

        return publish

    def counter(self, name: str, text: str, labels: dict[str, str]) -> Callable[[float], None]:
        """Return a function that raises a counter to a value, from 0 on."""
        metric = self.make(name, text, pb.MetricFamily.COUNTER, labels)
        published = 0.0

        def publish(value: float) -> None:
            nonlocal published
            if value > published:
                metric.increment(float(value - published))
                published = value

        return publish

    def histogram(
        self, name: str, text: str, labels: dict[str, str], bounds: list[float]
    ) -> Callable[[float], None]:
        """Return a function that adds a value to a histogram."""
        metric = self.make(name, text, pb.MetricFamily.HISTOGRAM, labels, buckets=bounds)
        return lambda value: metric.observe(float(value))

    def remove_gauges(self) -> None:
        """Remove the gauges from the server, as nothing sets them any more.

        Nothing else may refer to them. Counters stay: the model's next process goes on with them.
        """
        while self._gauges:
            del self._families[self._gauges.pop()]
        gc.collect()


class Publisher(Protocol):
    """A set of metrics that can be brought up to date."""

    def publish(self) -> None:
        """Bring the metrics up to date."""

    def close(self) -> None:
        """Remove the gauges."""


class Metrics:
    """The thread, and the metrics of one model, or of the engine if `is_engine`."""

    def __init__(self, bridge: Bridge, model: str, is_engine: bool) -> None:
        """Start the thread. Raises the server's error if it serves no metrics."""
        self._publisher: Publisher = (
            EngineMetrics(bridge, split_name(model)[0]) if is_engine else CallMetrics(bridge, model)
        )
        self._periodic = Periodic("metrics", _PERIOD_S, self._publish)

    def close(self) -> None:
        """End the thread, and remove what holds only while the model is loaded."""
        self._periodic.close()
        with must_end():
            self._publisher.close()

    def _publish(self) -> None:
        with must_end():
            self._publisher.publish()


class CallMetrics:
    """Metrics of the requests to one model, as its bridge sees them."""

    def __init__(self, bridge: Bridge, model: str) -> None:
        self._bridge = bridge
        families, labels = _Families(), {"model": model}
        self._families = families
        self._requests = families.counter("slipstream_requests_total", "Requests begun", labels)
        self._responses = families.counter("slipstream_responses_total", "Responses sent", labels)
        self._tokens = families.counter(
            "slipstream_response_tokens_total", "Tokens in responses", labels
        )
        self._refusals = {
            reason: families.counter(
                "slipstream_refusals_total",
                "Requests that were not begun, by why",
                labels | {"reason": reason},
            )
            for reason in REASONS
        }
        self._probes = families.counter(
            "slipstream_probe_requests_total", "Requests of probes begun", labels
        )
        self._probe_refusals = families.counter(
            "slipstream_probe_refusals_total", "Requests of probes that were not begun", labels
        )
        self._first_response = families.histogram(
            "slipstream_first_response_seconds",
            "From a streaming request to its first response",
            labels,
            _BUCKETS_S,
        )

    def publish(self) -> None:
        """Publish what was counted since the last call."""
        calls, probes = self._bridge.calls.clients, self._bridge.calls.probes
        self._requests(calls.num_calls)
        self._responses(calls.num_responses)
        self._tokens(calls.num_tokens)
        self._probes(probes.num_calls)
        self._probe_refusals(sum(dict(probes.refused).values()))
        refused: dict[str, int] = defaultdict(int)
        for reason, number in dict(calls.refused).items():
            refused[label_of(reason)] += number
        for reason, number in refused.items():
            self._refusals[reason](number)
        for seconds in calls.take_first_token_times():
            self._first_response(seconds)

    def close(self) -> None:
        """Do nothing: there are no gauges."""


class EngineMetrics:
    """Metrics of the engine; only one bridge of each engine has them."""

    def __init__(self, bridge: Bridge, deployment: str) -> None:
        self._deployment = deployment
        self._connection = bridge.connection
        self._repairs = bridge.repairs
        self._families = _Families()
        self._publishers: list[Callable[[Values], None]] = []
        self._observers: list[tuple[str, Callable[[float], None]]] = []
        self._totals = Totals()
        self._last: wire.Status | None = None
        self._answered_s = time.monotonic()
        self.publish()

    def publish(self) -> None:
        """Publish the engine's figures; while it does not answer, its silence only."""
        samples: dict[str, list[float]] = {}
        try:
            status = self._connection.request_status(_ANSWER_S, with_figures=True)
        except ContractError:
            pass
        else:
            if status.figures is None:
                return  # an engine that counts nothing
            self._answered_s = time.monotonic()
            self._last, samples = status, status.figures.samples
            self._totals.advance(status)
        if self._last is None:
            return
        if not self._publishers:
            self._make(self._last)
        values = self._values(self._last)
        for publisher in self._publishers:
            publisher(values)
        for name, observe in self._observers:
            for value in samples.get(name, ()):
                observe(value)

    def close(self) -> None:
        """Remove the gauges: that of the last update would look like that of a dead process."""
        self._publishers.clear()
        self._families.remove_gauges()

    def _make(self, status: wire.Status) -> None:
        assert status.figures is not None
        block_size = round(status.figures.gauges["block_size"])
        num_blocks = status.kv_blocks_total
        for metric in engine_metrics(status.model, block_size, num_blocks, self._deployment):
            self._make_one(metric)
        for metric in replica_metrics(len(status.replicas), self._deployment):
            self._make_one(metric)

    def _make_one(self, metric: Metric) -> None:
        families, name, text, labels = self._families, metric.family, metric.help, metric.labels
        if metric.kind is Kind.OBSERVED:
            observe = families.histogram(name, text, labels, list(metric.bounds))
            self._observers += [(figure, observe) for figure in metric.figures]
        elif metric.kind is Kind.BUCKETS:
            self._make_buckets(metric)
        else:
            make = families.gauge if metric.kind is Kind.GAUGE else families.counter
            publish, figures = make(name, text, labels), metric.figures
            self._publishers.append(
                lambda values: publish(sum([values[figure] for figure in figures]))
            )

    def _make_buckets(self, metric: Metric) -> None:
        families, text, labels = self._families, metric.help, metric.labels
        [figure] = metric.figures
        bounds = [*map(str, HISTOGRAMS[figure]), "+Inf"]
        buckets = [
            families.counter(f"{metric.family}_bucket", text, labels | {"le": bound})
            for bound in bounds
        ]
        publish_sum = families.counter(f"{metric.family}_sum", text, labels)
        publish_count = families.counter(f"{metric.family}_count", text, labels)

        def publish(values: Values) -> None:
            cells = [values[f"{figure}#{number}"] for number in range(len(buckets))]
            for publisher, value in zip(buckets, itertools.accumulate(cells), strict=True):
                publisher(value)
            publish_sum(values[f"{figure}#sum"])
            publish_count(sum(cells))

        self._publishers.append(publish)

    def _values(self, status: wire.Status) -> Values:
        """Return all figures by name."""
        assert status.figures is not None
        silent_s = time.monotonic() - self._answered_s
        is_silent = silent_s > _PERIOD_S
        used = status.kv_blocks_total - status.kv_blocks_free
        figures = status.figures
        return (
            self._totals.values
            | figures.gauges
            | replica_values(status.replicas)
            | {f"repairs:{kind}": count for kind, count in repairs.read(self._repairs).items()}
            | {
                "kv_blocks_free": status.kv_blocks_free,
                "kv_blocks_used": used,
                "kv_blocks_total": status.kv_blocks_total,
                "kv_usage": used / max(1, status.kv_blocks_total),
                "reused_blocks": self._totals.values["prefix_hits"] / figures.gauges["block_size"],
                "last_step_age_s": status.last_step_age_s + (silent_s if is_silent else 0.0),
                "answer_age_s": silent_s,
                "now_s": time.time(),
                "zero": 0.0,
                "one": 1.0,
            }
        )
