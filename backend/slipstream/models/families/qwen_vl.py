"""Qwen2-VL, Qwen2.5-VL (Bai et al., 2025) and Qwen3-VL: text models are Qwen 2's and 3's.

They rotate by time, height and width, which are the same for a text.
"""

from slipstream.models.wrapped import Whole, wraps

_OF_72B = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": 152064,
}


def _qwen2(model_type: str) -> Whole:
    texts = {f"{model_type}_text": "Qwen2ForCausalLM"}
    return Whole(
        model_type,
        texts,
        decoder="model",
        head="lm_head",
        others=("visual.",),
        is_flat=True,
        defaults=_OF_72B,
        text_ties=True,
    )


wraps("Qwen2VLForConditionalGeneration", _qwen2("qwen2_vl"))
wraps("Qwen2_5_VLForConditionalGeneration", _qwen2("qwen2_5_vl"))
wraps(
    "Qwen3VLForConditionalGeneration",
    Whole(
        "qwen3_vl",
        {"qwen3_vl_text": "Qwen3ForCausalLM"},
        decoder="model.language_model",
        head="lm_head",
        others=("model.visual.",),
        defaults={"max_position_embeddings": 128000, "rope_theta": 5e5},
    ),
)
