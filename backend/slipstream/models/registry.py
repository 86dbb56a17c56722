"""Which architectures are served, and the file that builds each. Imports torch only to build."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.layers.decoder import Decoder
    from slipstream.models.hf import ModelConfig
    from slipstream.models.weights import Weights

# `architectures` of config.json -> module of this package with a `build`.
_FAMILIES = {
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def supported() -> tuple[str, ...]:
    """Names that `config.json` may give as its architecture."""
    return tuple(_FAMILIES)


def build(config: "ModelConfig", weights: "Weights", max_model_len: int) -> "Decoder":
    """The decoder, weights in; `CheckpointError` if a tensor is missing, wrong or left over."""
    family = import_module(f"slipstream.models.{_FAMILIES[config.architecture]}")
    decoder: Decoder = family.build(config, weights, max_model_len)
    weights.finish()
    return decoder
