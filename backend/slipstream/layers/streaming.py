"""Endless sequences: attention over the first tokens and a window of the last.

See `kernels/sinks.py`. Positions grow without bound, so angles are made for a step's tokens alone,
in fp64: differences of large ones are as exact as those of small ones.
"""

import dataclasses

import torch
from torch import Tensor

from slipstream.kernels import rope
from slipstream.kernels.sinks import sink_attention
from slipstream.layers.attention import Attention, AttentionInputs
from slipstream.layers.decoder import Block, Decoder
from slipstream.layers.dims import RopeConfig
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.rope import cos_sin_at, frequencies


class StreamingAttention:
    """An attention layer with another look at what it has cached; weights and cache are the same.

    Args:
        attention: the layer.
        config: of its rotation.
        window: tokens that a query sees, its own and the sinks included.
        num_sinks: how many of these are the first of the sequence.
    """

    def __init__(
        self, attention: Attention, config: RopeConfig, window: int, num_sinks: int
    ) -> None:
        self._attention = attention
        self._frequencies = frequencies(config, attention.head_size)
        self._factor = config.attention_factor
        self._window = window
        self._num_sinks = num_sinks

    def __call__(
        self, norm: Norm, residual: Residual, inputs: AttentionInputs, cache: Tensor
    ) -> None:
        """As `Attention`; `inputs.positions` are those in the sequence, others of the table."""
        layer = self._attention
        (q, k, v), scales = layer.project(norm, residual)
        positions = inputs.positions
        turned = cos_sin_at(self._frequencies, positions) * self._factor
        where = (turned, torch.arange(len(q)), inputs.slots, cache)
        rope.rope_and_cache(q, k, v, *where, layer.q_norm, layer.k_norm, layer.eps, scales)
        back = cos_sin_at(self._frequencies, self.places(positions) - positions)
        sink_q = rope.rotate(q, *back.unsqueeze(1).chunk(2, dim=-1)).to(q.dtype)
        starts = torch.cat(
            (
                torch.arange(inputs.num_decodes, dtype=torch.int32),
                inputs.num_decodes + inputs.query_starts,
            )
        )
        rows = (inputs.block_tables, starts, inputs.lengths)
        out = sink_attention(q, sink_q, cache, *rows, layer.scale, self._window, self._num_sinks)
        layer.out.add_to(residual, out.flatten(1))

    def places(self, positions: Tensor) -> Tensor:
        """Which positions tokens have in the cache, when they are its newest."""
        return positions.clamp(max=self._window - 1)


def stream(decoder: Decoder, config: RopeConfig, window: int, num_sinks: int) -> None:
    """Give all layers of a decoder, which have no windows of their own, this one."""

    def streaming(block: Block) -> Block:
        assert isinstance(block.attention, Attention)
        attention = StreamingAttention(block.attention, config, window, num_sinks)
        return dataclasses.replace(block, attention=attention)

    decoder.blocks = [streaming(block) for block in decoder.blocks]
