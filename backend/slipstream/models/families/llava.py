"""LLaVA 1.5 and 1.6 (Liu et al., 2023), whose text models are of several families."""

from slipstream.models.wrapped import Whole, wraps

TEXTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}

wraps("LlavaForConditionalGeneration", Whole("llava", TEXTS, text_ties=True))
wraps("LlavaNextForConditionalGeneration", Whole("llava_next", TEXTS))
