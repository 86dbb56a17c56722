"""Gemma 3, text (Gemma Team, 2025): most layers see a window, every sixth sees everything.

Norms stand before and behind both halves of a block, and their weights are kept less 1.
"""

from slipstream.layers.attention import Attention
from slipstream.layers.decoder import Block, Decoder
from slipstream.layers.mlp import GeluMLP
from slipstream.layers.norm import Norm
from slipstream.layers.rope import cos_sin_table
from slipstream.models.hf import ModelConfig
from slipstream.models.weights import Weights


def build(config: ModelConfig, weights: Weights, max_model_len: int) -> Decoder:
    """`Gemma3ForCausalLM`."""
    d, bias = config.dims, config.attention_bias
    wide, local = (
        cos_sin_table(rope, d.head_size, max_model_len, weights.device)
        for rope in (config.rope, config.local_rope)
    )

    def norm(w: Weights, size: int) -> Norm:
        return Norm(w, size, d.eps, plus_one=True)

    def block(i: int) -> Block:
        w = weights.at(f"model.layers.{i}")
        own = w.at("self_attn")
        attention = Attention(
            own,
            d,
            local if config.windows[i] else wide,
            qkv_bias=bias,
            out_bias=bias,
            qk_norms=(norm(own.at("q_norm"), d.head_size), norm(own.at("k_norm"), d.head_size)),
            out_norm=norm(w.at("post_attention_layernorm"), d.hidden_size),
            scale=config.attention_scale,
        )
        mlp_out = norm(w.at("post_feedforward_layernorm"), d.hidden_size)
        return Block(
            norm(w.at("input_layernorm"), d.hidden_size),
            attention,
            norm(w.at("pre_feedforward_layernorm"), d.hidden_size),
            GeluMLP(w.at("mlp"), d, config.mlp_bias, mlp_out),
        )

    blocks = [block(i) for i in range(d.num_layers)]
    scale = float(d.hidden_size**0.5)
    return Decoder(weights, d, blocks, config.ties_embeddings, scale, norms_plus_one=True)
