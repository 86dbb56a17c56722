"""Parameters of config.pbtxt: the keys of TensorRT-LLM's templates that are honoured.

Templates of old deployments set dozens of them. One that asks for what is not done, or that nobody
knows, keeps the model from loading, by name: it must not look as if it had an effect.
"""

import difflib
from collections.abc import Mapping

from slipstream_contract.limits import MAX_BEAM_WIDTH

SERVED = frozenset(
    {"tokenizer_dir", "add_special_tokens", "skip_special_tokens", "exclude_input_in_output"}
)
_EITHER = ("true", "false")

# Key -> values that ask for what is done anyway, or for nothing.
NEUTRAL: dict[str, tuple[str, ...]] = {
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching"),
    "batch_scheduler_policy": ("max_utilization", "guaranteed_no_evict"),  # same tokens either way
    "max_beam_width": tuple(map(str, range(1, MAX_BEAM_WIDTH + 1))),
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p"),
    "enable_chunked_context": ("true",),
    "enable_kv_cache_reuse": ("true",),
    "enable_trt_overlap": _EITHER,
    "enable_context_fmha_fp32_acc": _EITHER,
    "multi_block_mode": _EITHER,
    "normalize_log_probs": _EITHER,  # of beams
    "speculative_decoding_fast_logits": ("false",),
    "sink_token_length": ("0",),
    "kv_cache_host_memory_bytes": ("0",),
    "gpu_weights_percent": ("1", "1.0"),
    "num_nodes": ("1",),
    "accumulate_tokens": ("false",),
    "tensorrt_llm_model_name": ("tensorrt_llm",),
    "REPORT_CUSTOM_METRICS": ("no", "false"),
    "ENABLE_VLLM_HEALTH_CHECK": ("no", "false"),
}

# Key -> where the same is said here.
_INSTEAD = {
    "enable_kv_cache_reuse": "kv_cache_reuse in tensorrt_llm/1/model.json",
    "max_tokens_in_paged_kv_cache": "kv_cache_tokens in tensorrt_llm/1/model.json",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_tokens in tensorrt_llm/1/model.json",
    "max_attention_window_size": "attention_window in tensorrt_llm/1/model.json",
    "sink_token_length": "sink_tokens in tensorrt_llm/1/model.json",
    "kv_cache_host_memory_bytes": "kv_cache_host_bytes in tensorrt_llm/1/model.json",
    "gpt_model_path": "checkpoint in tensorrt_llm/1/model.json",
    "hf_model_path": "checkpoint in tensorrt_llm/1/model.json",
}


def is_unset(name: str, value: str) -> bool:
    """Return whether the value is empty or a template's placeholder."""
    return value in ("", "${" + name + "}")


def refuse_unserved(model: str, parameters: Mapping[str, str]) -> None:
    """Check that every parameter is honoured or without effect. Raises ValueError for the first.

    Other keys in capitals are the server's own.
    """
    for name, value in parameters.items():
        if name in SERVED or is_unset(name, value):
            continue
        known = NEUTRAL.get(name)
        if known is None and name.isupper():
            continue
        if known is None or value.lower() not in known:
            raise ValueError(f"{model}: parameter {name} is {value[:64]!r}: {_advice(name, known)}")


def _advice(name: str, known: tuple[str, ...] | None) -> str:
    if name in _INSTEAD:
        return f"set {_INSTEAD[name]}"
    if known is not None:
        return f"only {' or '.join(known)} is served"
    near = difflib.get_close_matches(name, [*SERVED, *NEUTRAL], n=1)
    return f"not served; do you mean {near[0]}?" if near else "not served, leave it out"
