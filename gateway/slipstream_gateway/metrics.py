"""Metrics of the gateway in Prometheus' text format, and what the engine reports of itself."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from slipstream import wire

from slipstream_gateway.errors import ApiError
from slipstream_gateway.exchange import Exchange

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "slipstream_gateway_"


class Histogram:
    """Counts of values in buckets."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterable[str]:
        """Yield the lines of its text."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{le="{label}"}} {total}'
        yield f"{name}_sum {self._sum:g}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts since the start of the gateway."""

    def __init__(self) -> None:
        self.num_open = 0  # exchanges in flight
        self._started: dict[str, int] = defaultdict(int)
        self._finished: dict[str, int] = defaultdict(int)
        self._responses: dict[tuple[str, int], int] = defaultdict(int)
        self._prompt_tokens = self._cached_tokens = self._tokens = 0
        self._first_token, self._duration = Histogram(), Histogram()

    def start(self, at: str) -> None:
        """Count a request that goes to the engine."""
        self._started[at] += 1
        self.num_open += 1

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that does not go to the engine."""
        self._finished[f"refused_{error.status}"] += 1

    def count_response(self, path: str, status: int) -> None:
        """Count a response that has started."""
        self._responses[path, status] += 1

    def finish(self, exchange: Exchange) -> None:
        """Count what an exchange was."""
        self.num_open -= 1
        ended = "ok"
        if exchange.error is not None:
            ended = f"failed_{exchange.error.status}"
        elif exchange.is_abandoned:
            ended = "abandoned"
        self._finished[ended] += 1
        usage, times = exchange.usage, exchange.times
        self._prompt_tokens += usage.prompt
        self._cached_tokens += usage.cached
        self._tokens += usage.completion
        self._duration.add(time.monotonic() - times.start_s)
        if times.first_token_s:
            self._first_token.add(times.first_token_s - times.start_s)

    def page(self, statuses: Sequence[tuple[str, int, wire.Status | None]]) -> bytes:
        """Return the page.

        `statuses`: each model's name, the tokens of a block, and its engine's latest status.
        """
        lines: list[str] = []

        def add(name: str, kind: str, text: str, rows: Iterable[str]) -> None:
            lines.extend((f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"))
            lines.extend(f"{_PREFIX}{row}" for row in rows)

        add("open_requests", "gauge", "Requests in flight.", [f"open_requests {self.num_open}"])
        started = [f'requests_total{{endpoint="{at}"}} {n}' for at, n in self._started.items()]
        add("requests_total", "counter", "Requests sent to an engine.", started)
        ended = [f'ended_total{{how="{how}"}} {n}' for how, n in self._finished.items()]
        add("ended_total", "counter", "Requests that ended, by how.", ended)
        rows = [
            f'responses_total{{path="{path}",status="{status}"}} {n}'
            for (path, status), n in self._responses.items()
        ]
        add("responses_total", "counter", "Responses by path and status.", rows)
        for name, value, text in (
            ("prompt_tokens_total", self._prompt_tokens, "Tokens of prompts."),
            ("cached_tokens_total", self._cached_tokens, "Of these, found in the cache."),
            ("completion_tokens_total", self._tokens, "Tokens of answers."),
        ):
            add(name, "counter", text, [f"{name} {value}"])
        for name, histogram, text in (
            ("first_token_seconds", self._first_token, "Time to the first token."),
            ("request_seconds", self._duration, "Time of whole requests."),
        ):
            add(name, "histogram", text, histogram.lines(name))
        for name, kind, text, field in _OF_ENGINE:
            rows = [
                f'engine_{name}{{model="{model}"}} {getattr(status, field)}'
                for model, _, status in statuses
                if status is not None
            ]
            add(f"engine_{name}", kind, text, rows)
        lines.extend(_inference_gateway(statuses))
        lines.extend(_adapters(statuses))
        return ("\n".join(lines) + "\n").encode()


def _inference_gateway(statuses: Iterable[tuple[str, int, wire.Status | None]]) -> Iterable[str]:
    """Yield what Kubernetes' inference gateway reads at the port of requests, in vLLM's names."""
    given = [(name, size, status) for name, size, status in statuses if status is not None]
    for name, text, value in (
        ("num_requests_running", "Sequences that run.", lambda s: s.running),
        ("num_requests_waiting", "Sequences that wait.", lambda s: s.waiting),
        ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", _usage),
    ):
        yield f"# HELP vllm:{name} {text}"
        yield f"# TYPE vllm:{name} gauge"
        for model, _, status in given:
            yield f'vllm:{name}{{model_name="{model}"}} {value(status):g}'
    yield "# HELP vllm:cache_config_info The cache, in labels."
    yield "# TYPE vllm:cache_config_info gauge"
    for model, size, status in given:
        labels = f'block_size="{size}",num_gpu_blocks="{status.kv_blocks_total}"'
        yield f'vllm:cache_config_info{{model_name="{model}",{labels}}} 1'


def _usage(status: wire.Status) -> float:
    return 1.0 - status.kv_blocks_free / max(1, status.kv_blocks_total)


def _adapters(statuses: Iterable[tuple[str, int, wire.Status | None]]) -> Iterable[str]:
    """Yield the adapters in use as Kubernetes' inference gateway reads them; there is no limit."""
    name = "vllm:lora_requests_info"
    yield f"# HELP {name} Adapters of requests that run and that wait."
    yield f"# TYPE {name} gauge"
    for _, _, status in statuses:
        if status is not None:
            running, waiting = (
                ",".join(names).replace("\\", "\\\\").replace('"', '\\"')
                for names in (status.running_adapters, status.waiting_adapters)
            )
            labels = f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
            yield f'{name}{{{labels},max_lora="{MAX_ADAPTERS}"}} {time.time():.3f}'


def adapter_counts(statuses: Iterable[tuple[str, wire.Status | None]]) -> bytes:
    """Return what requests of each adapter have used, a line for each: on request alone."""
    lines: list[str] = []
    for name, text, field in _OF_ADAPTERS:
        lines += [f"# HELP slipstream_adapter_{name} {text}"]
        lines += [f"# TYPE slipstream_adapter_{name} counter"]
        for model, status in statuses:
            for each in [] if status is None else status.adapter_counts:
                own = each.name.replace("\\", "\\\\").replace('"', '\\"')
                labels = f'model="{model}",lora_name="{own}"'
                lines.append(f"slipstream_adapter_{name}{{{labels}}} {getattr(each, field)}")
    return ("\n".join(lines) + "\n").encode()


_OF_ADAPTERS = (
    ("requests_total", "Requests of the adapter.", "num_requests"),
    ("prompt_tokens_total", "Tokens of their prompts.", "num_prompt_tokens"),
    ("output_tokens_total", "Tokens of their answers.", "num_output_tokens"),
)
MAX_ADAPTERS = 1 << 16  # for a number without a limit
_OF_ENGINE = (
    ("running", "gauge", "Sequences that run.", "running"),
    ("waiting", "gauge", "Sequences that wait.", "waiting"),
    ("kv_blocks_free", "gauge", "Free blocks of the KV cache.", "kv_blocks_free"),
    ("kv_blocks", "gauge", "Blocks of the KV cache.", "kv_blocks_total"),
    ("steps_total", "counter", "Steps.", "num_steps"),
    ("preemptions_total", "counter", "Preemptions.", "num_preemptions"),
    ("prompt_tokens_total", "counter", "Prompt tokens computed.", "num_prompt_tokens"),
    ("output_tokens_total", "counter", "Tokens generated.", "num_output_tokens"),
    ("prefix_queries_total", "counter", "Prompt tokens looked up.", "num_prefix_queries"),
    ("prefix_hits_total", "counter", "Prompt tokens found in the cache.", "num_prefix_hits"),
)
