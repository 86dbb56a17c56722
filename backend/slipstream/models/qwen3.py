"""Qwen3 (Yang et al., 2025): Llama with each head's query and key normalised before rotation."""

from slipstream.layers.attention import Attention
from slipstream.layers.decoder import Block, Decoder
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.norm import Norm
from slipstream.layers.rope import cos_sin_table
from slipstream.models.hf import ModelConfig
from slipstream.models.weights import Weights


def build(config: ModelConfig, weights: Weights, max_model_len: int) -> Decoder:
    """`Qwen3ForCausalLM`; biases on all four attention matrices or none."""
    d, bias = config.dims, config.attention_bias
    cos_sin = cos_sin_table(config.rope, d.head_size, max_model_len, weights.device)

    def block(i: int) -> Block:
        w = weights.at(f"model.layers.{i}")
        own = w.at("self_attn")
        norms = (
            Norm(own.at("q_norm"), d.head_size, d.eps),
            Norm(own.at("k_norm"), d.head_size, d.eps),
        )
        return Block(
            Norm(w.at("input_layernorm"), d.hidden_size, d.eps),
            Attention(own, d, cos_sin, bias, bias, norms),
            Norm(w.at("post_attention_layernorm"), d.hidden_size, d.eps),
            GatedMLP(w.at("mlp"), d),
        )

    blocks = [block(i) for i in range(d.num_layers)]
    return Decoder(weights, d, blocks, config.ties_embeddings)
