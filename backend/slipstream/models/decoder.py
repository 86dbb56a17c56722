"""Build the decoder that a family's axes describe; count its elements."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.fuse.rewrite import rewrite
from slipstream.kernels.attention.scores import Scores
from slipstream.layers.attention import Attention, HeadNorm
from slipstream.layers.decoder import (
    AnyBlock,
    Block,
    Decoder,
    NormedBlock,
    ParallelBlock,
    PostNormBlock,
    ScaledNormedBlock,
    StepDecoder,
)
from slipstream.layers.embedding import Ends, embedding_and_head
from slipstream.layers.experts import Experts
from slipstream.layers.latent import LatentAttention
from slipstream.layers.mlp import (
    GatedMLP,
    GegeluMLP,
    GeluMLP,
    PlainMLP,
    TwoStepMLP,
    XieluMLP,
)
from slipstream.layers.norm import (
    BareNorm,
    Factor,
    LayerNorm,
    Norm,
    PartNorm,
    RowNorm,
    ScaledNorm,
    identity,
)
from slipstream.layers.ranks import SpreadLayerNorm, SpreadNorm
from slipstream.layers.rope import cos_sin_table, growth_table
from slipstream.layers.stages import Inlet, Outlet
from slipstream.models.axes import OF_HEADS, Activation, NormKind, QkNorms, Residuals
from slipstream.models.fileless import SizeSource
from slipstream.models.model_config import ModelConfig
from slipstream.models.registry import family_of
from slipstream.models.source import Weights

_GATED = {Activation.SILU: GatedMLP, Activation.GELU_TANH: GeluMLP}
_OF_LAYER = re.compile(r"\.\d+\.")  # tensors of numbered layers
_LAYER_NORMS = {  # whether it has a weight, and a bias
    NormKind.LAYER: (True, True),
    NormKind.LAYER_WITHOUT_BIAS: (True, False),
    NormKind.LAYER_ALONE: (False, False),
    NormKind.LAYER_ONE_PLUS: (True, True),
}


def build_any(config: ModelConfig, weights: Weights, max_model_len: int) -> StepDecoder:
    """Build the decoder with its weights: a family's, or another that the configuration names.

    Raises `CheckpointError` if a tensor is missing, wrong or left over.
    """
    return (config.build or build)(config, weights, max_model_len)


def build(config: ModelConfig, weights: Weights, max_model_len: int) -> Decoder:
    """Build a family's decoder with its weights, and fuse its GEMMs.

    Raises `CheckpointError` if a tensor is missing, wrong or left over.
    """
    own = family_of(config.architecture).build
    decoder = (own or build_decoder)(config, weights, max_model_len)
    weights.finish()
    return rewrite(decoder)


def build_decoder(config: ModelConfig, weights: Weights, max_model_len: int) -> Decoder:
    """Build blocks of norms, attention and an MLP as the axes describe them.

    It takes tensors by Llama's names; others are those of `_Builder`.
    """
    return _Builder(config, weights, max_model_len).decoder()


class _Builder:
    """The parts of a decoder.

    Tensors that Llama does not have are `attention_out_norm` and `mlp_out_norm` of a layer, its
    `self_attn.q_norm` and `k_norm`, and `model.embed_norm` and `embed_positions`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        self._config, self._weights = config, weights
        self._dims, self._axes = config.dims, config.axes
        size, slopes = config.dims.head_size, config.axes.slopes
        each = torch.tensor(slopes, dtype=torch.float32, device=weights.device)
        self._slopes = each if slopes else None
        size = config.axes.latent.rotated if config.axes.latent else size
        self._tables: dict[object, Tensor] = {
            rope: cos_sin_table(rope, size, max_model_len, weights.device)
            for rope in dict.fromkeys(config.ropes)
        }

        self._factors = None
        growth = config.axes.query_growth
        if growth is not None and max_model_len + growth.first > growth.every:
            table = growth.share, growth.every, growth.first
            self._factors = growth_table(*table, max_model_len, weights.device)

    def decoder(self) -> Decoder:
        """Build all."""
        d, axes = self._dims, self._axes
        if self._config.stage > 0:
            blocks = [self._block(i) for i in range(d.num_layers)]
            return Decoder(Inlet(), blocks, identity, Outlet())
        ends = Ends(
            axes.embedding_scale,
            self._config.max_positions if axes.learned_positions else 0,
            axes.position_offset,
            axes.head_bias,
            axes.logit_scale,
            axes.logit_cap,
            axes.embedding_size,
            axes.silent,
        )
        norm = self._norm(self._weights.at("model.embed_norm")) if axes.embedding_norm else None
        ties = self._config.ties_embeddings
        rows = replace(d, vocab_size=self._config.vocab_rows)
        embedding, head = embedding_and_head(self._weights, rows, ties, ends, norm)
        blocks = [self._block(i) for i in range(d.num_layers)]
        last = self._norm(self._weights.at("model.norm")) if axes.last_norm else identity
        return Decoder(embedding, blocks, last, head)

    def _norm(self, w: Weights, size: int | None = None) -> RowNorm:
        """Read a norm of the axes' kind; `size` is the hidden size if it is None."""
        size, kind = size or self._dims.hidden_size, self._axes.norm
        if kind in _LAYER_NORMS:
            plus = float(kind is NormKind.LAYER_ONE_PLUS)
            return LayerNorm(w, size, self._dims.eps, *_LAYER_NORMS[kind], added=plus)
        return Norm(w, size, self._dims.eps, kind is NormKind.ONE_PLUS_WEIGHT)

    def _before(self, w: Weights) -> RowNorm:
        return self._norm(w) if self._axes.norms_before else identity

    def _behind(self, w: Weights) -> RowNorm | None:
        """Return what stands between a result and the sum: a norm, a factor, both or nothing."""
        scale = self._axes.residual_scale
        if self._axes.norms_behind:
            return self._norm(w) if scale == 1.0 else ScaledNorm(self._norm(w), scale)
        return None if scale == 1.0 else Factor(scale)

    def _head_norms(self, w: Weights, turns: bool) -> tuple[HeadNorm, HeadNorm] | None:
        """Read the norms of queries and keys, of a layer that `turns` them by position or not."""
        kind, d = self._axes.qk_norms, self._dims
        if kind is QkNorms.NONE or (kind is QkNorms.BARE_HEADS and not turns):
            return None
        pairs = (("q_norm", d.num_heads), ("k_norm", d.num_kv_heads))
        q_norm, k_norm = (self._head_norm(w.at(name), heads) for name, heads in pairs)
        return q_norm, k_norm

    def _head_norm(self, w: Weights, heads: int) -> HeadNorm:
        kind, size, eps = self._axes.qk_norms, self._dims.head_size, self._dims.eps
        if kind in OF_HEADS:
            norm, count = self._norm_of_each(w, heads), self._axes.normed_size
            return HeadNorm(PartNorm(norm, count) if count else norm, size)
        if kind is QkNorms.LAYER_WHOLE:
            has_bias = self._axes.norm is NormKind.LAYER
            if self._config.num_ranks > 1:
                own = SpreadLayerNorm(w, heads * size, eps, has_bias)
                return HeadNorm(own, heads * size)
            return HeadNorm(LayerNorm(w, heads * size, eps, has_bias=has_bias), heads * size)
        assert kind is QkNorms.WHOLE, "no other norm is of all heads"
        plus_one = self._axes.norm is NormKind.ONE_PLUS_WEIGHT
        norm_of = SpreadNorm if self._config.num_ranks > 1 else Norm
        return HeadNorm(norm_of(w, heads * size, eps, plus_one), heads * size)

    def _norm_of_each(self, w: Weights, heads: int) -> Norm | LayerNorm:
        """Read the norm of each head by itself."""
        kind, size, eps = self._axes.qk_norms, self._dims.head_size, self._dims.eps
        if kind is QkNorms.HEADS:
            return Norm(w, size, eps, self._axes.norm is NormKind.ONE_PLUS_WEIGHT)
        if kind is QkNorms.BARE_HEADS:
            return BareNorm(w, size, eps)
        if kind is QkNorms.LAYER:
            return LayerNorm(w, size, eps)
        return LayerNorm(w, size, eps, has_bias=False, groups=heads)

    def _attention(self, i: int, w: Weights) -> Attention | LatentAttention:
        axes, own = self._axes, w.at("self_attn")
        turns, growth = self._config.ropes[i].rotated != 0, axes.query_growth
        grows = growth is not None and not (growth.of_still and turns)
        if axes.latent is not None:
            table, scale = self._tables[self._config.ropes[i]], axes.attention_scale
            assert scale is not None, "heads have two sizes"
            return LatentAttention(own, self._dims, axes.latent, table, axes.out_bias, scale)
        return Attention(
            own,
            self._dims,
            self._tables[self._config.ropes[i]],
            axes.qkv_bias,
            axes.out_bias,
            self._head_norms(own, turns),
            self._behind(w.at("attention_out_norm")),
            axes.attention_scale,
            most=axes.qkv_most,
            changed=Scores(axes.score_cap, self._slopes),
            has_sink_scores=axes.sink_scores,
            are_late=axes.late_norms,
            factors=self._factors if grows else None,
            has_two_positions=self._config.ropes[i].has_two,
        )

    def _mlp(self, w: Weights) -> TwoStepMLP:
        axes, out_norm = self._axes, self._behind(w.at("mlp_out_norm"))
        if axes.activation is Activation.GEGELU:
            limit = axes.gate_limit
            return GegeluMLP(w.at("mlp"), self._dims, axes.mlp_bias, out_norm, limit)
        if axes.gated:
            return _GATED[axes.activation](w.at("mlp"), self._dims, axes.mlp_bias, out_norm)
        if axes.activation is Activation.XIELU:
            return XieluMLP(w.at("mlp"), self._dims, axes.mlp_bias, out_norm)
        name = axes.activation.value
        return PlainMLP(w.at("mlp"), self._dims, name, axes.mlp_bias, out_norm)

    def _block(self, i: int) -> AnyBlock:
        w, residuals = self._weights.at(f"model.layers.{i}"), self._axes.residuals
        first = self._before(w.at("input_layernorm"))
        attention = self._attention(i, w)
        second = first
        if residuals is not Residuals.ONE_NORM:
            second = self._before(w.at("post_attention_layernorm"))
        experts = self._axes.experts
        if experts is not None and i not in self._axes.dense_layers:
            assert residuals is Residuals.SERIAL, "experts are added at once"
            out_norm = self._behind(w.at("mlp_out_norm"))
            mlp = Experts(w.at("mlp"), experts, self._dims.hidden_size, out_norm)
            return Block(first, attention, second, mlp)
        if residuals is Residuals.OF_NORMS and self._axes.sum_scale != 1.0:
            assert isinstance(attention, Attention), "no family has latents and scaled norms"
            return ScaledNormedBlock(first, attention, second, self._mlp(w), self._axes.sum_scale)
        if residuals is Residuals.OF_NORMS:
            return NormedBlock(first, attention, second, self._mlp(w))
        if residuals is Residuals.INTO_NORMS:
            return PostNormBlock(first, attention, second, self._mlp(w))
        if residuals is Residuals.SERIAL:
            return Block(first, attention, second, self._mlp(w))
        assert isinstance(attention, Attention), "no family has latents and parallel residuals"
        return ParallelBlock(first, attention, second, self._mlp(w))


def block_elements(config: ModelConfig) -> int:
    """Count the elements of all blocks' matrices, by a decoder on torch's device `meta`."""
    source = SizeSource()
    build_any(config, Weights(source, torch.device("meta"), torch.bfloat16), max_model_len=1)
    return sum(n for name, n in source.elements.items() if _OF_LAYER.search(name))
