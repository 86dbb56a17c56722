"""List the metric families for the engine's figures, under every name in use.

Names and labels of the `vllm:` and `nv_` families are those of vLLM and of TensorRT-LLM's Triton
backend, so that dashboards and autoscalers made for them keep working. docs/metrics.md explains
each of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from slipstream_contract.deployment import DEFAULT, ENGINE, name_of
from slipstream_runtime.repairs import KINDS

from slipstream.figures import COUNTERS, DRAFT_POSITIONS, DRAFTERS
from slipstream.wire import FinishReason, ReplicaState


class Kind(Enum):
    """The type of a metric."""

    GAUGE = auto()
    COUNTER = auto()
    BUCKETS = auto()  # a histogram as counters, `_bucket`, `_sum` and `_count`: see `metrics`
    OBSERVED = auto()  # a histogram of the server's own, observed value by value


@dataclass(frozen=True)
class Metric:
    """A metric, whose value is the sum of some figures."""

    family: str
    kind: Kind
    help: str
    figures: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()  # buckets of an observed histogram


def engine_metrics(
    model_name: str, block_size: int, num_blocks: int, deployment: str = DEFAULT
) -> list[Metric]:
    """Return all metrics of an engine that serves a model of this name.

    Ours of a deployment with a name have it as the label `engine`. The `vllm:` and `nv_` families
    have the name of the model of that kind in their label `model`.
    """
    own = {} if deployment == DEFAULT else {"engine": deployment}
    vllm = {"model_name": model_name, "engine": "0", "model": name_of(deployment, "vllm_model")}
    return [
        *(replace(metric, labels=own | metric.labels) for metric in _ours()),
        *_vllm(vllm | {"version": "1"}, block_size, num_blocks),
        *_tensorrt_llm({"model": name_of(deployment, ENGINE), "version": "1"}),
    ]


_REPLICA = {
    "up": (Kind.GAUGE, "Whether the engine of this replica takes requests"),
    "running_sequences": (Kind.GAUGE, "Sequences that this replica generates"),
    "waiting_sequences": (Kind.GAUGE, "Sequences that wait in this replica"),
    "kv_usage": (Kind.GAUGE, "Share of this replica's KV cache that is in use"),
    "requests_total": (Kind.COUNTER, "Requests that were routed to this replica"),
    "restarts_total": (Kind.COUNTER, "Engines of this replica that ended"),
}


def replica_metrics(count: int, deployment: str) -> list[Metric]:
    """Return the metrics of each of several replicas, with the label `replica`."""
    own = {} if deployment == DEFAULT else {"engine": deployment}
    return [
        Metric(
            f"slipstream_replica_{name}",
            kind,
            text,
            (f"replica:{number}:{name}",),
            own | {"replica": str(number)},
        )
        for number in range(count)
        for name, (kind, text) in _REPLICA.items()
    ]


def replica_values(replicas: Sequence[ReplicaState]) -> dict[str, float]:
    """Return the gauges of `replica_metrics`."""
    values: dict[str, float] = {}
    for each in replicas:
        used = each.kv_blocks_total - each.kv_blocks_free
        name = f"replica:{each.number}:"
        values[name + "up"] = float(each.is_up)
        values[name + "running_sequences"] = each.running
        values[name + "waiting_sequences"] = each.waiting
        values[name + "kv_usage"] = used / max(1, each.kv_blocks_total)
    return values


_FREEING_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_COSTS = tuple(digit * 10.0**power for power in range(-7, 2) for digit in (1, 2, 5))
_GAUGES = {
    "running_sequences": ("Sequences that the engine generates", "running"),
    "waiting_sequences": ("Sequences that wait in the engine", "waiting"),
    "waiting_requests": ("Requests that wait and never ran", "waiting_requests"),
    "waiting_tokens": ("Tokens of the prompts of waiting requests", "waiting_tokens"),
    "last_step_age_seconds": (
        "Since the engine's last step, or its last answer if it gives none; 0 while it is idle",
        "last_step_age_s",
    ),
    "engine_answer_age_seconds": ("Since the engine last answered", "answer_age_s"),
    "engine_start_time_seconds": ("When the engine began, since the epoch", "start_time_s"),
    "metrics_update_time_seconds": ("When these metrics were told, since the epoch", "now_s"),
    "engine_resident_bytes": ("Memory of the engine's process", "host_bytes"),
    "cached_blocks": ("Free blocks that hold what may be asked for again", "cached_blocks"),
    "adapters_on_device": ("Adapters on the device, or on their way there", "adapters_on_device"),
    "adapter_pages": ("Pages for adapters on the device", "adapter_pages"),
    "adapter_pages_free": ("Pages for adapters that none has", "adapter_pages_free"),
    "gpu_hour_price": ("What the operator says that an hour of one GPU costs", "gpu_hour_price"),
}
_SINGLE_COUNTERS = {
    "engine_restarts": ("Engines that began in the place of one that ended", "engine_restarts"),
    "steps": ("Steps of the engine", "steps"),
    "preemptions": ("Sequences put back to waiting for lack of blocks", "preemptions"),
    "prompt_tokens": ("Tokens of prompts that were computed", "prompt_tokens"),
    "output_tokens": ("Tokens generated", "output_tokens"),
    "prefix_queries": ("Tokens of prompts that were looked for in the cache", "prefix_queries"),
    "prefix_hits": ("Tokens of prompts that were found there", "prefix_hits"),
    "host_evicted_blocks": ("Blocks that were lost from host memory", "host_evicted_blocks"),
    "adapter_loads": ("Adapters that were copied to the device", "adapter_loads"),
    "adapter_evictions": ("Adapters that gave up their pages to others", "adapter_evictions"),
    "dropped_messages": ("Frames from bridges that were no message", "dropped_messages"),
    "probe_seconds": ("Time from a probe's arrival to its end, of all together", "probe_s"),
    "probe_cost": ("Cost of what was computed for probes", "probe_cost"),
}
_SPLIT_COUNTERS = {
    "step_seconds": ("Time of steps, by who was waited for", "part", "step_s"),
    "first_token_wait_seconds": (
        "What first tokens waited for, all together",
        "part",
        "first_token_wait_s",
    ),
    "finished_sequences": ("Sequences that ended, by why", "reason", "finished"),
    "cancels": ("Requests ended before their end, by why", "cause", "cancels"),
    "evicted_blocks": (
        "Blocks of the cache that were taken for something else, by priority",
        "priority",
        "evicted_blocks",
    ),
    "found_tokens": (
        "Tokens that sequences found in the cache when they were admitted, by where",
        "place",
        "found_tokens",
    ),
    "moved_blocks": ("Blocks moved to host memory and back", "direction", "moved_blocks"),
    "moved_bytes": (
        "Bytes copied to host memory and back",
        "direction",
        "moved_bytes",
    ),
    "drafts": ("Runs of drafts of a sequence that a step verified", "drafter", "drafts"),
    "draft_tokens": ("Drafts that were verified", "drafter", "drafted_tokens"),
    "accepted_draft_tokens": ("Drafts that became tokens", "drafter", "accepted_tokens"),
    "accepted_drafts_at": (
        "Drafts that became tokens, by their position in the step",
        "position",
        "accepted_at",
    ),
    "cost": ("Cost of what was computed for sequences that ended, by why", "reason", "cost"),
    "probes": ("Probes that asked for a token and ended, by why", "reason", "probe_finished"),
    "probe_tokens": ("Tokens computed for probes", "kind", "probe_tokens"),
    "probe_step_seconds": (
        "The share of probes in the time of steps, by who was waited for",
        "part",
        "probe_step_s",
    ),
}


def _ours() -> Iterator[Metric]:
    for name, (text, figure) in _GAUGES.items():
        yield Metric(f"slipstream_{name}", Kind.GAUGE, text, (figure,))
    for state in ("free", "used"):
        text, labels = "Blocks of the KV cache", {"state": state}
        yield Metric("slipstream_kv_blocks", Kind.GAUGE, text, (f"kv_blocks_{state}",), labels)
    for kind in KINDS:
        text, labels = "Repairs by `slipstream serve` since it began, by of what", {"what": kind}
        yield Metric("slipstream_repairs", Kind.GAUGE, text, (f"repairs:{kind}",), labels)
    for state in ("free", "cached", "leaving", "arriving"):
        text, labels = "Blocks of host memory", {"state": state}
        figures = (f"host_blocks_{state}",)
        yield Metric("slipstream_host_blocks", Kind.GAUGE, text, figures, labels)
    for name, (text, figure) in _SINGLE_COUNTERS.items():
        yield Metric(f"slipstream_{name}_total", Kind.COUNTER, text, (figure,))
    for name, (text, label, figure) in _SPLIT_COUNTERS.items():
        for word in COUNTERS[figure]:
            figures, labels = (f"{figure}:{word}",), {label: word}
            yield Metric(f"slipstream_{name}_total", Kind.COUNTER, text, figures, labels)
    yield Metric(
        "slipstream_cancel_to_free_seconds",
        Kind.OBSERVED,
        "From the notice of a cancel until its blocks are free",
        ("cancel_to_free_s",),
        bounds=_FREEING_S,
    )
    yield Metric(
        "slipstream_request_cost",
        Kind.OBSERVED,
        "Cost of a request, in the currency of the price; nothing without a price",
        ("request_cost",),
        bounds=_COSTS,
    )


_VLLM_GAUGES = {
    "num_requests_running": ("Sequences that the engine generates", "running"),
    "num_requests_waiting": ("Sequences that wait in the engine", "waiting"),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1", "kv_usage"),
    "gpu_cache_usage_perc": ("The older name of kv_cache_usage_perc", "kv_usage"),
}
_VLLM_COUNTERS = {
    "prompt_tokens": ("Tokens of prompts that were computed", "prompt_tokens"),
    "generation_tokens": ("Tokens generated", "output_tokens"),
    "num_preemptions": ("Sequences put back to waiting for lack of blocks", "preemptions"),
    "prefix_cache_queries": ("Tokens that were looked for in the cache", "prefix_queries"),
    "prefix_cache_hits": ("Tokens that were found there", "prefix_hits"),
}
_VLLM_DRAFTS = {
    "num_drafts": ("Runs of drafts of a sequence that a step verified", "drafts"),
    "num_draft_tokens": ("Drafts that were verified", "drafted_tokens"),
    "num_accepted_tokens": ("Drafts that became tokens", "accepted_tokens"),
}
_VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", "first_token_s"),
    "inter_token_latency_seconds": ("From a token to the next", "inter_token_s"),
    "time_per_output_token_seconds": (
        "The older name of inter_token_latency_seconds",
        "inter_token_s",
    ),
    "request_time_per_output_token_seconds": (
        "Mean time from a token to the next, of a request",
        "token_mean_s",
    ),
    "e2e_request_latency_seconds": ("From arrival to the end", "end_to_end_s"),
    "request_queue_time_seconds": ("From arrival to the first step", "queue_s"),
    "request_prefill_time_seconds": ("From the first step to the first token", "prefill_s"),
    "request_decode_time_seconds": ("From the first token to the last", "decode_s"),
    "request_inference_time_seconds": ("From the first step to the last token", "inference_s"),
    "request_prompt_tokens": ("Tokens of the prompt", "input_tokens"),
    "request_generation_tokens": ("Tokens generated", "output_tokens"),
    "request_max_num_generation_tokens": (
        "Tokens of the longest of a request's sequences",
        "max_output_tokens",
    ),
    "request_params_max_tokens": ("max_tokens as asked for", "asked_tokens"),
    "request_params_n": ("n as asked for", "asked_sequences"),
    "iteration_tokens_total": ("Tokens of a step", "step_tokens"),
}
_VLLM_REASONS = {
    "stop": (FinishReason.END, FinishReason.STOP),
    "length": (FinishReason.LENGTH,),
    "abort": (FinishReason.CANCELLED, FinishReason.DEADLINE),
    "error": (FinishReason.ERROR,),
}


def _vllm(labels: dict[str, str], block_size: int, num_blocks: int) -> Iterator[Metric]:
    for name, (text, figure) in _VLLM_GAUGES.items():
        yield Metric(f"vllm:{name}", Kind.GAUGE, text, (figure,), labels)
    for name, (text, figure) in _VLLM_COUNTERS.items():
        yield Metric(f"vllm:{name}_total", Kind.COUNTER, text, (figure,), labels)
    for reason, reasons in _VLLM_REASONS.items():
        yield Metric(
            "vllm:request_success_total",
            Kind.COUNTER,
            "Sequences that ended, by why",
            tuple(f"finished:{each}" for each in reasons),
            labels | {"finished_reason": reason},
        )
    for name, (text, figure) in _VLLM_DRAFTS.items():
        figures = tuple(f"{figure}:{drafter}" for drafter in DRAFTERS)
        yield Metric(f"vllm:spec_decode_{name}_total", Kind.COUNTER, text, figures, labels)
    for place, position in enumerate(DRAFT_POSITIONS[:-1]):
        text, own = "Drafts that became tokens, by their place from 0", {"position": str(place)}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        yield Metric(name, Kind.COUNTER, text, (f"accepted_at:{position}",), labels | own)
    for name, (text, figure) in _VLLM_HISTOGRAMS.items():
        yield Metric(f"vllm:{name}", Kind.BUCKETS, text, (figure,), labels)
    config = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}
    text = "Configuration of the KV cache"
    yield Metric("vllm:cache_config_info", Kind.GAUGE, text, ("one",), labels | config)


_TRT_LLM_GAUGES = {
    ("request_metrics", "request_type", "TRT LLM request metrics"): {
        "active": "active_requests",
        "max": "max_num_seqs",
        "scheduled": "scheduled_sequences",
        "context": "context_sequences",
        "waiting": "waiting",
    },
    ("runtime_memory_metrics", "memory_type", "TRT LLM runtime memory metrics"): {
        "cpu": "host_bytes",
        "gpu": "device_bytes",
        "pinned": "pinned_bytes",
    },
    ("kv_cache_block_metrics", "kv_cache_block_type", "TRT LLM KV cache block metrics"): {
        "max": "kv_blocks_total",
        "free": "kv_blocks_free",
        "used": "kv_blocks_used",
        "tokens_per": "block_size",
        "reused": "reused_blocks",
        "fraction": "kv_usage",
    },
    (
        "inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        "TRT LLM inflight_batcher-specific metrics",
    ): {
        "total_context_tokens": "context_tokens",
        "generation_requests": "generation_sequences",
        "micro_batch_id": "zero",
        "paused_requests": "preempted_sequences",
    },
    ("general_metrics", "general_type", "General TRT LLM metrics"): {
        "timestamp": "now_s",
        "iteration_counter": "steps",
    },
}


def _tensorrt_llm(labels: dict[str, str]) -> Iterator[Metric]:
    for (name, label, text), words in _TRT_LLM_GAUGES.items():
        for word, figure in words.items():
            family = f"nv_trt_llm_{name}"
            yield Metric(family, Kind.GAUGE, text, (figure,), labels | {label: word})
    for word in ("kv_cache_transfer_ms", "request_count"):
        yield Metric(
            "nv_trt_llm_disaggregated_serving_metrics",
            Kind.COUNTER,
            "TRT LLM disaggregated serving metrics",
            ("zero",),
            labels | {"disaggregated_serving_type": word},
        )
    for side in ("input", "output"):
        yield Metric(
            f"nv_llm_{side}_token_len",
            Kind.BUCKETS,
            f"LLM {side} token length",
            (f"request_{side}_tokens",),
            labels | {"response_metric_type": f"total_{side}_tokens"},
        )
