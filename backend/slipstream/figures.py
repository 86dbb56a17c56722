"""Name the metrics that the engine sends in `wire.Figures`, for both sides.

A counter with a label is named `name:word`. All words are listed here, so a label can never have
more values than these.
"""

from collections.abc import Iterable

from slipstream.wire import CancelCause, FinishReason

_Bounds = tuple[float, ...]

# Upper bounds of buckets: vLLM's, which its dashboards expect, and finer ones below them.
_FIRST_TOKEN: _Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS: _Bounds = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075),  # finer
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCIES: _Bounds = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2),  # finer
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTHS: _Bounds = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))
_TRT_LLM_LENGTHS: _Bounds = (10, 50, 100, 500, 1000)

# Of drafts; `client`: those that a request brings.
DRAFTERS = ("lookup", "suffix", "forced", "client", "synthetic", "draft", "medusa", "eagle3")
DRAFT_POSITIONS = (*map(str, range(1, 9)), "later")  # in a step, from 1
EVICTIONS = ("below", "usual", "above")  # by retention priority, compared with the default
# What a first token waits for: the way to the engine, the queue, the step in flight; then, while
# its prompt is computed, its own chunks, those of others, decodes, and the host.
FIRST_TOKEN_PARTS = (
    *("received", "queue", "step_before"),
    *("own_chunks", "other_prompts", "streams", "host"),
)
GAUGES = (  # those of requests exclude probes
    "running",  # sequences
    "waiting",
    "active_requests",
    "scheduled_sequences",  # this and the next three: of the last step
    "context_sequences",
    "context_tokens",
    "generation_sequences",
    "waiting_requests",
    "waiting_tokens",
    "preempted_sequences",  # waiting to run again
    "max_num_seqs",
    "block_size",
    "cached_blocks",  # free blocks that hold a prefix
    "adapters_on_device",
    "adapter_pages",  # of the device
    "adapter_pages_free",
    "host_blocks_free",  # slots in host memory
    "host_blocks_cached",
    "host_blocks_leaving",  # device to host
    "host_blocks_arriving",  # host to device
    "host_bytes",
    "device_bytes",
    "pinned_bytes",
    "start_time_s",  # since the epoch
    "gpu_hour_price",
)
COUNTERS: dict[str, Iterable[str]] = {
    "steps": (),
    "step_s": ("host", "device"),
    "first_token_wait_s": FIRST_TOKEN_PARTS,
    "prompt_tokens": (),
    "output_tokens": (),
    "preemptions": (),
    "prefix_queries": (),  # prompt tokens, at the first admission
    "prefix_hits": (),  # those of them that were in the cache
    "evicted_blocks": EVICTIONS,
    "found_tokens": ("device", "host"),  # prefix hits of all admissions
    "moved_blocks": ("out", "in"),  # to host memory, and back
    "moved_bytes": ("out", "in"),
    "host_evicted_blocks": (),
    "adapter_loads": (),  # to the device
    "adapter_evictions": (),
    "finished": tuple(FinishReason),  # sequences
    "cancels": tuple(CancelCause),  # requests
    "cost": tuple(FinishReason),
    "dropped_messages": (),
    "drafts": DRAFTERS,  # sequences in steps that verify some
    "drafted_tokens": DRAFTERS,
    "accepted_tokens": DRAFTERS,
    "accepted_at": DRAFT_POSITIONS,
    # The counters above exclude probes; these count probes.
    "probe_finished": tuple(FinishReason),
    "probe_tokens": ("prompt", "output"),
    "probe_s": (),  # seconds from arrival to end
    "probe_step_s": ("host", "device"),
    "probe_cost": (),
}
HISTOGRAMS: dict[str, _Bounds] = {
    "first_token_s": _FIRST_TOKEN,
    "inter_token_s": _BETWEEN_TOKENS,
    "token_mean_s": _BETWEEN_TOKENS,
    "end_to_end_s": _LATENCIES,
    "queue_s": _LATENCIES,
    "prefill_s": _LATENCIES,
    "decode_s": _LATENCIES,
    "inference_s": _LATENCIES,
    "input_tokens": _LENGTHS,
    "output_tokens": _LENGTHS,
    "max_output_tokens": _LENGTHS,  # of the longest sequence of a request
    "asked_tokens": _LENGTHS,
    "asked_sequences": (1.0, 2.0, 5.0, 10.0, 20.0),
    "step_tokens": (1.0, *(2.0**power for power in range(3, 15))),
    "request_input_tokens": _TRT_LLM_LENGTHS,
    "request_output_tokens": _TRT_LLM_LENGTHS,
}
SAMPLES = ("cancel_to_free_s", "request_cost")


def counter_names() -> list[str]:
    """Return the name of every counter, `name:word` for each word of a label."""
    return [
        f"{name}:{word}" if word else name
        for name, words in COUNTERS.items()
        for word in (words or ("",))
    ]
