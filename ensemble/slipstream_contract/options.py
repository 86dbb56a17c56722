"""Parameters of config.pbtxt: the keys of TensorRT-LLM's templates that are honoured.

Templates of old deployments set dozens of them. One that asks for what is not done, or that nobody
knows, keeps the model from loading, by name: it must not look as if it had an effect.
"""

import difflib
from collections.abc import Callable, Mapping

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
    # Beams and lookahead are a request's to ask for; the others are the engine's: see below.
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p", "beam_search", "lookahead"),
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

_DRAFTERS = {"medusa": "medusa", "eagle": "eagle3"}
"""Decoding mode -> the engine's `speculation` that is meant."""

Engine = Mapping[str, object]


def _speculation(engine: Engine) -> object:
    return engine.get("speculation", "none")


def _is_same(name: str) -> Callable[[str, Engine], bool]:
    return lambda value, engine: _close(value) == _close(str(engine.get(name, "")))


def _close(text: str) -> str:
    return "".join(text.split())


# Key -> whether a value says what the engine does, by its settings.
_OF_ENGINE: dict[str, Callable[[str, Engine], bool]] = {
    "decoding_mode": lambda value, engine: _DRAFTERS.get(value.lower()) == _speculation(engine),
    "tensorrt_llm_draft_model_name": lambda _, engine: _speculation(engine) == "draft",
    "medusa_choices": _is_same("medusa_choices"),
    "eagle_choices": _is_same("eagle_choices"),
}

# Key -> where the same is said here; {} is the file with the engine's settings.
_INSTEAD = {
    "enable_kv_cache_reuse": "kv_cache_reuse in {}",
    "max_tokens_in_paged_kv_cache": "kv_cache_tokens in {}",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_tokens in {}",
    "max_attention_window_size": "attention_window in {}",
    "sink_token_length": "sink_tokens in {}",
    "kv_cache_host_memory_bytes": "kv_cache_host_bytes in {}",
    "tensorrt_llm_draft_model_name": "speculation to draft, and draft_checkpoint, in {}",
    "medusa_choices": "the same medusa_choices in {}",
    "eagle_choices": "the same eagle_choices in {}",
    **dict.fromkeys(
        ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
        "speculation and num_draft_tokens in {}, or this in requests",
    ),
    "gpt_model_path": "checkpoint in {}",
    "hf_model_path": "checkpoint in {}",
}


def is_unset(name: str, value: str) -> bool:
    """Return whether the value is empty or a template's placeholder."""
    return value in ("", "${" + name + "}")


def refuse_unserved(model: str, parameters: Mapping[str, str], engine: Engine, file: str) -> None:
    """Check that every parameter is honoured or without effect. Raises ValueError for the first.

    Other keys in capitals are the server's own.

    Args:
        model: whose parameters these are.
        parameters: as they are written.
        engine: settings of the engine, where known.
        file: where these are, for messages.
    """
    for name, value in parameters.items():
        if name in SERVED or is_unset(name, value):
            continue
        known, is_true = NEUTRAL.get(name, ()), _OF_ENGINE.get(name)
        if value.lower() in known or (is_true is not None and is_true(value, engine)):
            continue
        if known or is_true is not None or not name.isupper():
            advice = _advice(name, value, known).replace("{}", file)
            raise ValueError(f"{model}: parameter {name} is {value[:64]!r}: {advice}")


def _advice(name: str, value: str, known: tuple[str, ...]) -> str:
    if name == "decoding_mode" and value.lower() in _DRAFTERS:
        return f"set speculation to {_DRAFTERS[value.lower()]} in {{}}"
    if name in _INSTEAD:
        return f"set {_INSTEAD[name]}"
    if known:
        return f"only {' or '.join(known)} is served"
    near = difflib.get_close_matches(name, [*SERVED, *NEUTRAL, *_OF_ENGINE], n=1)
    return f"not served; do you mean {near[0]}?" if near else "not served, leave it out"
