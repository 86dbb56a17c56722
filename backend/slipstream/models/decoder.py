"""Build the decoder that a family's axes describe; count its elements."""

from dataclasses import dataclass

import torch

from slipstream.fuse.rewrite import rewrite
from slipstream.layers.attention import Attention
from slipstream.layers.decoder import Block, Decoder
from slipstream.layers.mlp import GatedMLP, GeluMLP
from slipstream.layers.norm import Norm
from slipstream.layers.rope import cos_sin_table
from slipstream.models.axes import Activation, NormKind
from slipstream.models.model_config import ModelConfig
from slipstream.models.registry import family_of
from slipstream.models.weights import SizeSource, Weights

_MLPS = {Activation.SILU: GatedMLP, Activation.GELU_TANH: GeluMLP}


def build(config: ModelConfig, weights: Weights, max_model_len: int) -> Decoder:
    """Build the decoder with its weights, and fuse its GEMMs.

    Raises `CheckpointError` if a tensor is missing, wrong or left over.
    """
    own = family_of(config.architecture).build
    decoder = (own or build_decoder)(config, weights, max_model_len)
    weights.finish()
    return rewrite(decoder)


def build_decoder(config: ModelConfig, weights: Weights, max_model_len: int) -> Decoder:
    """Build blocks of norms, attention and an MLP as the axes describe them.

    It takes tensors by Llama's names; norms behind attention and MLP are
    `attention_out_norm` and `mlp_out_norm`.
    """
    d, axes = config.dims, config.axes
    plus_one = axes.norm is NormKind.ONE_PLUS_WEIGHT
    tables = {
        rope: cos_sin_table(rope, d.head_size, max_model_len, weights.device)
        for rope in (config.rope, config.local_rope)
    }

    def norm(w: Weights, size: int) -> Norm:
        return Norm(w, size, d.eps, plus_one)

    def block(i: int) -> Block:
        w = weights.at(f"model.layers.{i}")
        own = w.at("self_attn")
        qk_norms = attention_out = mlp_out = None
        if axes.qk_norms:
            qk_norms = norm(own.at("q_norm"), d.head_size), norm(own.at("k_norm"), d.head_size)
        input_norm = norm(w.at("input_layernorm"), d.hidden_size)
        if axes.norms_behind:
            attention_out = norm(w.at("attention_out_norm"), d.hidden_size)
            mlp_out = norm(w.at("mlp_out_norm"), d.hidden_size)
        attention = Attention(
            own,
            d,
            tables[config.local_rope if config.windows[i] else config.rope],
            axes.qkv_bias,
            axes.out_bias,
            qk_norms,
            attention_out,
            axes.attention_scale,
        )
        return Block(
            input_norm,
            attention,
            norm(w.at("post_attention_layernorm"), d.hidden_size),
            _MLPS[axes.activation](w.at("mlp"), d, axes.mlp_bias, mlp_out),
        )

    blocks = [block(i) for i in range(d.num_layers)]
    return Decoder(weights, d, blocks, config.ties_embeddings, axes.embedding_scale, plus_one)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Element counts of a decoder's matrices, without vectors."""

    outside: int  # embedding and head; tied ones count once
    blocks: int


def sizes(config: ModelConfig) -> Sizes:
    """Count the elements of a decoder built on torch's device `meta`, without allocating it."""
    source = SizeSource()
    build(config, Weights(source, torch.device("meta"), torch.float32), max_model_len=1)
    in_blocks = sum(n for name, n in source.elements.items() if name.startswith("model.layers."))
    return Sizes(sum(source.elements.values()) - in_blocks, in_blocks)
