"""Qwen2 and 2.5 (Yang et al., 2024): Llama with biases on q, k and v alone."""

from slipstream.layers.attention import Attention
from slipstream.layers.decoder import Block, Decoder
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.norm import Norm
from slipstream.layers.rope import cos_sin_table
from slipstream.models.hf import ModelConfig
from slipstream.models.weights import Weights


def build(config: ModelConfig, weights: Weights, max_model_len: int) -> Decoder:
    """`Qwen2ForCausalLM`."""
    d = config.dims
    cos_sin = cos_sin_table(config.rope, d.head_size, max_model_len, weights.device)

    def block(i: int) -> Block:
        w = weights.at(f"model.layers.{i}")
        return Block(
            Norm(w.at("input_layernorm"), d.hidden_size, d.eps),
            Attention(w.at("self_attn"), d, cos_sin, qkv_bias=True),
            Norm(w.at("post_attention_layernorm"), d.hidden_size, d.eps),
            GatedMLP(w.at("mlp"), d),
        )

    blocks = [block(i) for i in range(d.num_layers)]
    return Decoder(weights, d, blocks, config.ties_embeddings)
