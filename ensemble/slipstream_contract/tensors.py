"""Every tensor of every model, declared once: config.pbtxt, requests and clients read it here.

The lines of the tables below are those of `declarations`. `STREAM_STATE` is ours, between
`tensorrt_llm` and `postprocessing`, and so is `add_special_tokens` (false: the prompt holds its
special tokens already, as rendered chat templates do). `random_seed`, `min_length` and
`return_kv_cache_reuse_stats` are what clients before 2025 call `seed`, `min_tokens` and
`return_perf_metrics`; they are inputs of their own because Triton refuses undeclared ones.
"""

import msgspec

from slipstream_contract.declarations import Model, tensors_of
from slipstream_contract.limits import MAX_BATCH_SIZE

ALIASES = {
    "random_seed": "seed",
    "min_length": "min_tokens",
    "return_kv_cache_reuse_stats": "return_perf_metrics",
}
"""Name of an older contract -> name of this one."""

TO_LLM = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
"""Input of `ensemble` -> what `tensorrt_llm` calls it. All others that both have share a name."""

# --- ensemble and tensorrt_llm_bls ---------------------------------------------------------------

_TEXT_INPUTS = """
    text_input STRING[1]
    decoder_text_input STRING[1]? =
    max_tokens INT32[1]
    num_return_sequences INT32[1]?
    bad_words STRING[-1]?
    stop_words STRING[-1]?
    exclude_input_in_output BOOL[1]?
    end_id INT32[1]?
    pad_id INT32[1]?
    top_k INT32[1]?
    top_p FP32[1]?
    temperature FP32[1]?
    length_penalty FP32[1]?
    repetition_penalty FP32[1]?
    min_tokens INT32[1]?
    min_length INT32[1]?
    presence_penalty FP32[1]?
    frequency_penalty FP32[1]?
    no_repeat_ngram_size INT32[1]?
    allowed_token_ids INT32[-1]?~
    dry_sequence_breakers STRING[-1]?~
    logits_processors STRING[1]?~
    seed UINT64[1]?
    random_seed UINT64[1]?
    return_log_probs BOOL[1]?
    return_context_logits BOOL[1]?
    return_generation_logits BOOL[1]?
    return_perf_metrics BOOL[1]?
    return_kv_cache_reuse_stats BOOL[1]?
    return_num_input_tokens BOOL[1]?
    return_num_output_tokens BOOL[1]?
    beam_width INT32[1]?
    stream BOOL[1]?
    prompt_embedding_table FP16[-1,-1]?
    prompt_table_extra_id UINT64[1]?
    prompt_vocab_size INT32[1]?
    embedding_bias_words STRING[-1]?
    embedding_bias_weights FP32[-1]?
    add_special_tokens BOOL[1]?
    lora_task_id UINT64[1]?
    lora_weights FP16[-1,-1]?~
    lora_config INT32[-1,3]?~
    guided_decoding_guide_type STRING[1]?~
    guided_decoding_guide STRING[1]?~
"""

_BLS_INPUTS = """
    image_input FP16[-1,3,-1,-1]? =
    image_bytes_input UINT8[-1,-1,-1,-1]? =
    image_url_input STRING[1]? =
    video_bytes_input UINT8[-1,-1,-1,-1]? =
    num_draft_tokens INT32[1]?
    use_draft_logits BOOL[1]?r
"""

_BLS_SCALARS = """
    num_return_sequences lora_task_id return_log_probs return_context_logits
    return_generation_logits return_perf_metrics return_kv_cache_reuse_stats
    return_num_input_tokens return_num_output_tokens
"""

_EXTRA_OUTPUTS = """
    cum_log_probs FP32[-1]
    output_log_probs FP32[-1,-1]
    context_logits FP32[-1,-1]
    generation_logits FP32[-1,-1,-1]
    batch_index INT32[1]
    sequence_index INT32[1]
    kv_cache_alloc_new_blocks INT32[1]
    kv_cache_reused_blocks INT32[1]
    kv_cache_alloc_total_blocks INT32[1]
    arrival_time_ns INT64[1]
    first_scheduled_time_ns INT64[1]
    first_token_time_ns INT64[1]
    last_token_time_ns INT64[1]
    acceptance_rate FP32[1]
    total_accepted_draft_tokens INT32[1]
    total_draft_tokens INT32[1]
    num_input_tokens INT32[1]
    num_output_tokens INT32[1]
"""

_TEXT_OUTPUTS = f"text_output STRING[-1]{_EXTRA_OUTPUTS}"

# --- preprocessing and postprocessing ------------------------------------------------------------

_PREPROCESSING_INPUTS = """
    QUERY STRING[1]
    DECODER_QUERY STRING[1]? =
    IMAGE_BYTES UINT8[-1,-1,-1,-1]? =
    IMAGE_URL STRING[1]? =
    IMAGES STRING[-1]? =
    VIDEO_BYTES UINT8[-1,-1,-1,-1]? =
    REQUEST_OUTPUT_LEN INT32[1]
    BAD_WORDS_DICT STRING[-1]?
    STOP_WORDS_DICT STRING[-1]?
    EMBEDDING_BIAS_WORDS STRING[-1]?
    EMBEDDING_BIAS_WEIGHTS FP32[-1]?
    ADD_SPECIAL_TOKENS BOOL[1]?
    END_ID INT32[1]?
    PAD_ID INT32[1]?
    PROMPT_TABLE_EXTRA_ID UINT64[1]?
"""

_PREPROCESSING_OUTPUTS = """
    INPUT_ID INT32[-1]
    REQUEST_INPUT_LEN INT32[1]
    DECODER_INPUT_ID INT32[-1] =
    REQUEST_DECODER_INPUT_LEN INT32[1] =
    BAD_WORDS_IDS INT32[2,-1]
    STOP_WORDS_IDS INT32[2,-1]
    EMBEDDING_BIAS FP32[-1]
    REQUEST_OUTPUT_LEN INT32[-1]
    OUT_END_ID INT32[1]
    OUT_PAD_ID INT32[1]
    OUT_PROMPT_TABLE_EXTRA_IDS UINT64[-1]
    PIXEL_VALUES FP16[-1,-1,-1,-1] =
    ASPECT_RATIO_IDS INT64[-1] =
    ASPECT_RATIO_MASK INT64[-1,-1] =
    CROSS_ATTENTION_MASK INT64[-1,-1,-1] =
    IMAGE_SIZES INT64[-1,2] =
    IS_VIDEO_INPUT BOOL[1] =
    ATTENTION_MASK INT64[-1] =
    IMAGE_GRID_THW INT64[3] =
    VISION_INPUT_ID INT32[-1] =
"""

# Ragged: responses of different lengths share one call of the dynamic batcher.
_POSTPROCESSING_INPUTS = """
    TOKENS_BATCH INT32[-1,-1]?~
    SEQUENCE_LENGTH INT32[-1]?
    STREAM_STATE INT64[-1]?~
"""

# --- tensorrt_llm --------------------------------------------------------------------------------

_LLM_INPUTS = """
    input_ids INT32[-1]?~
    encoder_input_features FP16[-1,-1]?~ =
    encoder_output_lengths INT32[1]?r =0
    input_lengths INT32[1]r
    request_output_len INT32[1]r
    num_return_sequences INT32[1]?r
    draft_input_ids INT32[-1]?~
    decoder_input_ids INT32[-1]?~ =
    decoder_input_lengths INT32[1]?r =0
    draft_logits FP32[-1,-1]?~
    draft_acceptance_threshold FP32[1]?r
    end_id INT32[1]?r
    pad_id INT32[1]?r
    stop_words_list INT32[2,-1]?~
    bad_words_list INT32[2,-1]?~
    embedding_bias FP32[-1]?~
    beam_width INT32[1]?r
    temperature FP32[1]?r
    runtime_top_k INT32[1]?r
    runtime_top_p FP32[1]?r
    runtime_top_p_min FP32[1]?r
    runtime_top_p_decay FP32[1]?r
    runtime_top_p_reset_ids INT32[1]?r
    len_penalty FP32[1]?r
    early_stopping BOOL[1]?r
    repetition_penalty FP32[1]?r
    min_tokens INT32[1]?r
    min_length INT32[1]?r
    beam_search_diversity_rate FP32[1]?r
    presence_penalty FP32[1]?r
    frequency_penalty FP32[1]?r
    no_repeat_ngram_size INT32[1]?r
    allowed_token_ids INT32[-1]?~
    dry_sequence_breakers STRING[-1]?~
    logits_processors STRING[1]?~
    seed UINT64[1]?r
    random_seed UINT64[1]?r
    return_log_probs BOOL[1]?r
    return_context_logits BOOL[1]?r
    return_generation_logits BOOL[1]?r
    return_perf_metrics BOOL[1]?r
    return_kv_cache_reuse_stats BOOL[1]?r
    return_num_input_tokens BOOL[1]?r
    return_num_output_tokens BOOL[1]?r
    exclude_input_in_output BOOL[1]?r
    stop BOOL[1]?r
    streaming BOOL[1]?r
    prompt_embedding_table FP16[-1,-1]?~
    prompt_table_extra_ids UINT64[-1]?~
    prompt_vocab_size INT32[1]?r
    cross_attention_mask BOOL[-1,-1]?~ =
    mrope_rotary_cos_sin FP32[-1]? =
    mrope_position_deltas INT64[1]? =0
    lora_task_id UINT64[1]?r
    lora_weights FP16[-1,-1]?~
    lora_config INT32[-1,3]?~
    context_phase_params UINT8[-1]?~ =
    skip_cross_attn_blocks BOOL[1]?~ =0
    retention_token_range_starts INT32[-1]?~
    retention_token_range_ends INT32[-1]?~
    retention_token_range_priorities INT32[-1]?~
    retention_token_range_durations_ms INT32[-1]?~
    retention_decode_priority INT32[1]?~
    retention_decode_duration_ms INT32[1]?~
    guided_decoding_guide_type STRING[1]?~
    guided_decoding_guide STRING[1]?~
    lookahead_window_size INT32[1]?~
    lookahead_ngram_size INT32[1]?~
    lookahead_verification_set_size INT32[1]?~
"""

_LLM_OUTPUTS = f"""
    output_ids INT32[-1,-1]
    sequence_length INT32[-1]
    context_phase_params UINT8[-1] =
    {_EXTRA_OUTPUTS}
    STREAM_STATE INT64[-1]
"""

# --- vllm_model ----------------------------------------------------------------------------------

_VLLM_INPUTS = """
    text_input STRING[1]
    image STRING[-1]? =
    stream BOOL[1]?
    sampling_parameters STRING[1]?
    add_special_tokens BOOL[1]?
    exclude_input_in_output BOOL[1]?
    return_finish_reason BOOL[1]?
    return_cumulative_logprob BOOL[1]?
    return_logprobs BOOL[1]?
    return_num_input_tokens BOOL[1]?
    return_num_output_tokens BOOL[1]?
    embedding_request STRING[1]? =
"""

_VLLM_OUTPUTS = """
    text_output STRING[-1]
    finish_reason STRING[-1]
    cumulative_logprob FP32[-1]
    logprobs STRING[-1]
    prompt_logprobs STRING[-1]
    num_input_tokens UINT32[1]
    num_output_tokens UINT32[-1]
"""

# --- NVIDIA's LLM API ----------------------------------------------------------------------------

_LLMAPI_INPUTS = """
    text_input STRING[-1]
    image_url STRING[-1]? =
    streaming BOOL[1]?
    sampling_param_best_of INT32[1]?
    sampling_param_temperature FP32[1]?
    sampling_param_top_k INT32[1]?
    sampling_param_top_p FP32[1]?
    sampling_param_frequency_penalty FP32[1]?
    sampling_param_presence_penalty FP32[1]?
    sampling_param_max_tokens INT32[1]?
    sampling_param_stop STRING[-1]?
    sampling_param_seed UINT64[1]?
    sampling_param_exclude_input_from_output BOOL[1]?
    sampling_param_return_perf_metrics BOOL[1]?
    sampling_param_logits_post_processor_name STRING[1]? =
    return_finish_reason BOOL[1]?
    return_stop_reason BOOL[1]?
    return_cumulative_logprob BOOL[1]?
    stop BOOL[1]?
    lora_id UINT64[1]? =
    lora_name STRING[1]?
    lora_path STRING[1]? =
    lora_ckpt_source STRING[1]? =
"""

_LLMAPI_OUTPUTS = """
    text_output STRING[-1]
    finish_reason STRING[-1]
    stop_reason STRING[-1]
    cumulative_logprob FP32[-1]
    kv_cache_reused_block INT32[-1]
    kv_cache_missed_block INT32[-1]
    kv_cache_alloc_new_blocks INT32[-1]
    kv_cache_alloc_total_blocks INT32[-1]
    kv_cache_hit_rate FP32[-1]
    arrival_time_ns INT64[1]
    first_scheduled_time_ns INT64[1]
    first_token_time_ns INT64[1]
    last_token_time_ns INT64[1]
    acceptance_rate FP32[1]
    total_accepted_draft_tokens INT32[1]
    total_draft_tokens INT32[1]
"""

# --- models --------------------------------------------------------------------------------------

# A process that makes text fills a core with the responses of some 400 streams of 100 tokens/s.
_NUM_TEXT = 2
_NUM_STAGE = 2  # while the server sends on what one has made, the other makes the next


def _bridge(
    name: str,
    size: int,
    inputs: str,
    outputs: str,
    num_instances: int = 1,
    is_decoupled: bool = True,
) -> Model:
    return Model(
        name,
        "slipstream",
        size,
        tensors_of(inputs),
        tensors_of(outputs),
        is_decoupled,
        num_instances=num_instances,
    )


def _stage(name: str, inputs: str, outputs: str, has_dynamic_batching: bool) -> Model:
    return Model(
        name,
        f"slipstream_{name}",
        MAX_BATCH_SIZE,
        tensors_of(inputs),
        tensors_of(outputs),
        has_dynamic_batching=has_dynamic_batching,
        instance_kind="KIND_CPU",
        num_instances=_NUM_STAGE,
    )


def _bls() -> Model:
    inputs = _TEXT_INPUTS + _BLS_INPUTS
    model = _bridge("tensorrt_llm_bls", MAX_BATCH_SIZE, inputs, _TEXT_OUTPUTS, _NUM_TEXT)
    scalars = _BLS_SCALARS.split()
    tensors = (
        msgspec.structs.replace(tensor, is_scalar=tensor.is_scalar or tensor.name in scalars)
        for tensor in model.inputs
    )
    return msgspec.structs.replace(model, inputs=tuple(tensors))


_ALL = (
    Model(
        "ensemble",
        "",
        MAX_BATCH_SIZE,
        tensors_of(_TEXT_INPUTS),
        tensors_of(_TEXT_OUTPUTS),
        num_instances=_NUM_TEXT,
    ),
    _stage("preprocessing", _PREPROCESSING_INPUTS, _PREPROCESSING_OUTPUTS, True),
    _bridge("tensorrt_llm", MAX_BATCH_SIZE, _LLM_INPUTS, _LLM_OUTPUTS),
    # A queue drops requests whose client is gone; the ensemble then fails while `tensorrt_llm` runs
    # for it, and before Triton 26.03 it is never freed.
    _stage("postprocessing", _POSTPROCESSING_INPUTS, "OUTPUT STRING[-1]", False),
    _bls(),
    _bridge("vllm_model", 0, _VLLM_INPUTS, _VLLM_OUTPUTS, _NUM_TEXT),
    # Not decoupled, so that probes can be plain `/infer` and gRPC calls.
    _bridge("slipstream_health", 0, "probe BOOL[1]?", "status STRING[1]", is_decoupled=False),
)

MODELS = {model.name: model for model in _ALL}
"""Name -> model. The fused wiring serves `ensemble` by backend `slipstream`, decoupled."""

# One process, as an input `stop` must reach the one that has the request. NVIDIA's own model calls
# itself `tensorrt_llm` and is not decoupled: `compose --contract` can choose both otherwise.
LLMAPI = _bridge("llmapi_model", 0, _LLMAPI_INPUTS, _LLMAPI_OUTPUTS, is_decoupled=False)
"""NVIDIA's LLM-API model, which a repository has on request, under any name."""
