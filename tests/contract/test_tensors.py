"""The declaration against a second one, typed from the contract in another notation."""

import msgspec
import pytest
from slipstream_contract.declarations import Tensor
from slipstream_contract.limits import MAX_BATCH_SIZE
from slipstream_contract.tensors import ALIASES, MODELS, TO_LLM

# What clients of these models rely on, grouped as the published configurations have it:
# type, dims, flags (o: optional, r: ragged, s: scalar inside) -> names.
ENSEMBLE_IN = {
    ("STRING", (1,), ""): "text_input",
    ("INT32", (1,), ""): "max_tokens",
    ("STRING", (1,), "o"): "decoder_text_input",
    ("INT32", (1,), "o"): (
        "num_return_sequences end_id pad_id top_k min_tokens beam_width prompt_vocab_size"
    ),
    ("STRING", (-1,), "o"): "bad_words stop_words embedding_bias_words",
    ("BOOL", (1,), "o"): (
        "exclude_input_in_output return_log_probs return_context_logits return_generation_logits "
        "return_perf_metrics return_num_input_tokens return_num_output_tokens stream"
    ),
    ("FP32", (1,), "o"): (
        "top_p temperature length_penalty repetition_penalty presence_penalty frequency_penalty"
    ),
    ("UINT64", (1,), "o"): "seed prompt_table_extra_id lora_task_id",
    ("FP16", (-1, -1), "o"): "prompt_embedding_table",
    ("FP32", (-1,), "o"): "embedding_bias_weights",
    ("FP16", (-1, -1), "or"): "lora_weights",
    ("INT32", (-1, 3), "or"): "lora_config",
    ("STRING", (1,), "or"): "guided_decoding_guide_type guided_decoding_guide",
}
SPECIAL = {("BOOL", (1,), "o"): "add_special_tokens"}
OWN_LISTS = {
    ("INT32", (-1,), "or"): "allowed_token_ids",
    ("STRING", (-1,), "or"): "dry_sequence_breakers",
    ("STRING", (1,), "or"): "logits_processors",
}
ENSEMBLE_OWN = SPECIAL | OWN_LISTS | {("INT32", (1,), "o"): "no_repeat_ngram_size"}
LLM_OWN = OWN_LISTS | {("INT32", (1,), "os"): "no_repeat_ngram_size"}
ENSEMBLE_OLD = {
    ("UINT64", (1,), "o"): "random_seed",
    ("INT32", (1,), "o"): "min_length",
    ("BOOL", (1,), "o"): "return_kv_cache_reuse_stats",
}
METRICS_OUT = {
    ("FP32", (-1,), ""): "cum_log_probs",
    ("FP32", (-1, -1), ""): "output_log_probs context_logits",
    ("FP32", (-1, -1, -1), ""): "generation_logits",
    ("INT32", (1,), ""): (
        "batch_index sequence_index kv_cache_alloc_new_blocks kv_cache_reused_blocks "
        "kv_cache_alloc_total_blocks total_accepted_draft_tokens total_draft_tokens "
        "num_input_tokens num_output_tokens"
    ),
    ("INT64", (1,), ""): (
        "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"
    ),
    ("FP32", (1,), ""): "acceptance_rate",
}
ENSEMBLE_OUT = METRICS_OUT | {("STRING", (-1,), ""): "text_output"}
LLM_IN = {
    ("INT32", (1,), "s"): "input_lengths request_output_len",
    ("INT32", (-1,), "or"): (
        "input_ids draft_input_ids decoder_input_ids retention_token_range_starts "
        "retention_token_range_ends retention_token_range_priorities "
        "retention_token_range_durations_ms"
    ),
    ("FP16", (-1, -1), "or"): "encoder_input_features prompt_embedding_table lora_weights",
    ("INT32", (1,), "os"): (
        "encoder_output_lengths num_return_sequences decoder_input_lengths end_id pad_id "
        "beam_width runtime_top_k runtime_top_p_reset_ids min_tokens prompt_vocab_size"
    ),
    ("FP32", (-1, -1), "or"): "draft_logits",
    ("FP32", (1,), "os"): (
        "draft_acceptance_threshold temperature runtime_top_p runtime_top_p_min "
        "runtime_top_p_decay len_penalty repetition_penalty beam_search_diversity_rate "
        "presence_penalty frequency_penalty"
    ),
    ("INT32", (2, -1), "or"): "stop_words_list bad_words_list",
    ("FP32", (-1,), "or"): "embedding_bias",
    ("BOOL", (1,), "os"): (
        "early_stopping return_log_probs return_context_logits return_generation_logits "
        "return_perf_metrics return_num_input_tokens return_num_output_tokens "
        "exclude_input_in_output stop streaming"
    ),
    ("UINT64", (1,), "os"): "seed lora_task_id",
    ("UINT64", (-1,), "or"): "prompt_table_extra_ids",
    ("BOOL", (-1, -1), "or"): "cross_attention_mask",
    ("FP32", (-1,), "o"): "mrope_rotary_cos_sin",
    ("INT64", (1,), "o"): "mrope_position_deltas",
    ("INT32", (-1, 3), "or"): "lora_config",
    ("UINT8", (-1,), "or"): "context_phase_params",
    ("BOOL", (1,), "or"): "skip_cross_attn_blocks",
    ("INT32", (1,), "or"): (
        "retention_decode_priority retention_decode_duration_ms lookahead_window_size "
        "lookahead_ngram_size lookahead_verification_set_size"
    ),
    ("STRING", (1,), "or"): "guided_decoding_guide_type guided_decoding_guide",
}
LLM_OLD = {
    ("UINT64", (1,), "os"): "random_seed",
    ("INT32", (1,), "os"): "min_length",
    ("BOOL", (1,), "os"): "return_kv_cache_reuse_stats",
}
LLM_OUT = METRICS_OUT | {
    ("INT32", (-1, -1), ""): "output_ids",
    ("INT32", (-1,), ""): "sequence_length",
    ("UINT8", (-1,), ""): "context_phase_params",
    ("INT64", (-1,), ""): "STREAM_STATE",
}
PRE_IN = {
    ("STRING", (1,), ""): "QUERY",
    ("INT32", (1,), ""): "REQUEST_OUTPUT_LEN",
    ("STRING", (1,), "o"): "DECODER_QUERY IMAGE_URL",
    ("UINT8", (-1, -1, -1, -1), "o"): "IMAGE_BYTES VIDEO_BYTES",
    ("STRING", (-1,), "o"): "IMAGES BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS",
    ("FP32", (-1,), "o"): "EMBEDDING_BIAS_WEIGHTS",
    ("INT32", (1,), "o"): "END_ID PAD_ID",
    ("UINT64", (1,), "o"): "PROMPT_TABLE_EXTRA_ID",
}
PRE_OUT = {
    ("INT32", (-1,), ""): "INPUT_ID DECODER_INPUT_ID REQUEST_OUTPUT_LEN VISION_INPUT_ID",
    ("INT32", (1,), ""): "REQUEST_INPUT_LEN REQUEST_DECODER_INPUT_LEN OUT_END_ID OUT_PAD_ID",
    ("INT32", (2, -1), ""): "BAD_WORDS_IDS STOP_WORDS_IDS",
    ("FP32", (-1,), ""): "EMBEDDING_BIAS",
    ("UINT64", (-1,), ""): "OUT_PROMPT_TABLE_EXTRA_IDS",
    ("FP16", (-1, -1, -1, -1), ""): "PIXEL_VALUES",
    ("INT64", (-1,), ""): "ASPECT_RATIO_IDS ATTENTION_MASK",
    ("INT64", (-1, -1), ""): "ASPECT_RATIO_MASK",
    ("INT64", (-1, -1, -1), ""): "CROSS_ATTENTION_MASK",
    ("INT64", (-1, 2), ""): "IMAGE_SIZES",
    ("BOOL", (1,), ""): "IS_VIDEO_INPUT",
    ("INT64", (3,), ""): "IMAGE_GRID_THW",
}
PRE_OWN = {("BOOL", (1,), "o"): "ADD_SPECIAL_TOKENS"}
POST_IN = {
    ("INT32", (-1, -1), "or"): "TOKENS_BATCH",
    ("INT32", (-1,), "o"): "SEQUENCE_LENGTH",
    ("INT64", (-1,), "or"): "STREAM_STATE",
}
VLLM_IN = {
    ("STRING", (1,), ""): "text_input",
    ("STRING", (-1,), "o"): "image",
    ("BOOL", (1,), "o"): (
        "stream exclude_input_in_output return_finish_reason return_cumulative_logprob "
        "return_logprobs return_num_input_tokens return_num_output_tokens"
    ),
    ("STRING", (1,), "o"): "sampling_parameters embedding_request",
}
VLLM_OUT = {
    ("STRING", (-1,), ""): "text_output finish_reason logprobs prompt_logprobs",
    ("FP32", (-1,), ""): "cumulative_logprob",
    ("UINT32", (1,), ""): "num_input_tokens",
    ("UINT32", (-1,), ""): "num_output_tokens",
}
BLS_SCALARS = {
    "num_return_sequences",
    "lora_task_id",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "return_kv_cache_reuse_stats",
    "return_num_input_tokens",
    "return_num_output_tokens",
}
BLS_MORE = {
    "image_input": ("FP16", (-1, 3, -1, -1), "o"),
    "image_bytes_input": ("UINT8", (-1, -1, -1, -1), "o"),
    "image_url_input": ("STRING", (1,), "o"),
    "video_bytes_input": ("UINT8", (-1, -1, -1, -1), "o"),
    "num_draft_tokens": ("INT32", (1,), "o"),
    "use_draft_logits": ("BOOL", (1,), "os"),
}


def table(*groups) -> dict[str, tuple[str, tuple[int, ...], str]]:
    named = {}
    for group in groups:
        for kind, names in group.items():
            for name in names.split():
                assert name not in named, f"{name} is twice in the test's table"
                named[name] = kind
    return named


def declared(tensors: tuple[Tensor, ...]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    kinds = {}
    for tensor in tensors:
        flags = "o" * tensor.is_optional + "r" * tensor.is_ragged + "s" * tensor.is_scalar
        kinds[tensor.name] = (str(tensor.dtype), tensor.dims, flags)
    assert len(kinds) == len(tensors), "a name is declared twice"
    return kinds


def ensemble() -> dict[str, tuple[str, tuple[int, ...], str]]:
    return table(ENSEMBLE_IN) | table(ENSEMBLE_OLD) | table(ENSEMBLE_OWN)


def bls() -> dict[str, tuple[str, tuple[int, ...], str]]:
    kinds = {}
    for name, (dtype, dims, flags) in ensemble().items():
        kinds[name] = (dtype, dims, flags + "s" * (name in BLS_SCALARS))
    return kinds | BLS_MORE


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("ensemble", ensemble(), table(ENSEMBLE_OUT)),
        ("tensorrt_llm", table(LLM_IN) | table(LLM_OLD) | table(LLM_OWN), table(LLM_OUT)),
        ("preprocessing", table(PRE_IN) | table(PRE_OWN), table(PRE_OUT)),
        ("postprocessing", table(POST_IN), {"OUTPUT": ("STRING", (-1,), "")}),
        ("tensorrt_llm_bls", bls(), table(ENSEMBLE_OUT)),
        ("vllm_model", table(VLLM_IN) | table(SPECIAL), table(VLLM_OUT)),
    ],
)
def test_every_tensor_is_what_the_contract_says(model, inputs, outputs):
    assert declared(MODELS[model].inputs) == inputs
    assert declared(MODELS[model].outputs) == outputs


def test_batches():
    sizes = {name: model.max_batch_size for name, model in MODELS.items()}
    unbatched = {"vllm_model": 0, "slipstream_health": 0}
    assert sizes == dict.fromkeys(sizes, MAX_BATCH_SIZE) | unbatched


def test_older_names_are_inputs_of_the_type_of_the_newer():
    for model in ("ensemble", "tensorrt_llm", "tensorrt_llm_bls"):
        for old, new in ALIASES.items():
            renamed = msgspec.structs.replace(MODELS[model].input(old), name=new)
            assert renamed == MODELS[model].input(new)


def test_inputs_of_the_ensemble_reach_a_model_of_the_same_type_and_status():
    """A text input that is refused here must not be served there, and the other way round."""
    for tensor in MODELS["ensemble"].inputs:
        name = TO_LLM.get(tensor.name, tensor.name)
        there = {inner.name: inner for inner in MODELS["tensorrt_llm"].inputs}.get(name)
        if there is not None:
            assert (there.dtype, there.dims) == (tensor.dtype, tensor.dims)
            assert there.neutral == tensor.neutral


LATER = "decoder_text_input"


def test_what_is_not_served_yet():
    later = {tensor.name for tensor in MODELS["ensemble"].inputs if tensor.neutral is not None}
    assert later == set(LATER.split())
    # Nothing that a request must have can be later work.
    for model in MODELS.values():
        assert all(t.is_optional for t in model.inputs if t.neutral is not None)
