"""Endless sequences: attention over the first tokens and a window of the last.

See `kernels/attention/sinks.py`. Positions grow without bound, so angles are made for a step's
tokens alone, in fp64: differences of large ones are as exact as those of small ones.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.sinks import Sinks, sink_attention
from slipstream.layers.attention import Attention, AttentionInputs
from slipstream.layers.decoder import Block, Decoder
from slipstream.layers.dims import RopeConfig
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.rope import cos_sin_at, frequencies


@dataclass(frozen=True, slots=True)
class StreamingInputs(AttentionInputs):
    """`positions` are those in the sequence, all else is of its table, which lacks tokens.

    In the last layer `n` of `positions` and of `further` are those that are asked for.
    """

    angles: Tensor  # [n, d] f32: cosines and sines of the positions
    further: Tensor  # [n, d] f32: from there to the positions in the cache
    every: Tensor  # [n] i64: 0, 1, ...
    starts: Tensor  # [s + 1] i32: `query_starts` where decodes are chunks, too

    def of_last_layer(self, sample_rows: Tensor, sample_starts: Tensor) -> Self:
        """As `AttentionInputs` has it."""
        decodes = self.starts[: self.num_decodes]
        return replace(
            AttentionInputs.of_last_layer(self, sample_rows, sample_starts),
            positions=self.positions[sample_rows],
            further=self.further[sample_rows],
            starts=torch.cat((decodes, self.num_decodes + sample_starts)),
        )


@dataclass(frozen=True, slots=True)
class Streaming:
    """What all layers of a decoder that streams have in common."""

    frequencies: Tensor  # [d / 2] f32, radians a position
    factor: float  # of cosines and sines
    window: int  # tokens that a query sees, its own and the sinks included
    num_sinks: int  # how many of these are the first of the sequence

    def inputs(
        self,
        cache: Tensor,
        num_q_heads: int,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        num_decodes: int,
        max_queries: int,
    ) -> StreamingInputs:
        """As `AttentionInputs.of`."""
        places = positions.clamp(max=self.window - 1)  # in the cache, of its newest tokens
        decodes = torch.arange(num_decodes, dtype=torch.int32, device=positions.device)
        plan = plan_decode(
            lengths[:num_decodes], cache, num_q_heads, self.window, num_sinks=self.num_sinks
        )
        return StreamingInputs(
            positions,
            slots,
            block_tables,
            query_starts,
            lengths,
            num_decodes,
            max_queries,
            plan,
            self.window,
            None,
            cos_sin_at(self.frequencies, positions) * self.factor,
            cos_sin_at(self.frequencies, places - positions),
            torch.arange(len(positions), device=positions.device),
            torch.cat((decodes, num_decodes + query_starts)),
        )


class StreamingAttention:
    """An attention layer with another look at what it has cached; weights and cache are the same.

    Args:
        attention: the layer.
        streaming: what it has in common with others.
    """

    def __init__(self, attention: Attention, streaming: Streaming) -> None:
        self._attention = attention
        self._streaming = streaming

    def __call__(
        self, norm: Norm, residual: Residual, inputs: AttentionInputs, cache: Tensor
    ) -> None:
        """As `Attention`, of `StreamingInputs`."""
        assert isinstance(inputs, StreamingInputs)
        layer = self._attention
        (q, k, v), scales = layer.project(norm, residual)
        # Without a plan decodes are chunks.
        n = inputs.num_decodes if len(inputs.plan) > 0 else 0
        angles = (inputs.angles, inputs.every)
        newest = layer.rotate(q, k, v, scales, n, *angles, inputs.slots, cache)
        q = inputs.keep_asked(q, residual)
        out = self._attend(q, newest, inputs, n, cache)
        layer.out.add_to(residual, layer.unscaled(out, cache).flatten(1))

    def _attend(
        self, q: Tensor, newest: Newest | None, inputs: StreamingInputs, n: int, cache: Tensor
    ) -> Tensor:
        """The first `n` rows as decodes, all others as chunks; `[n, heads, d]`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        tables, lengths, further = inputs.block_tables, inputs.lengths, inputs.further
        scale, window = self._attention.scale_of(cache), self._streaming.window
        num_sinks = self._streaming.num_sinks
        if n > 0:
            where = (cache, tables[:n], lengths[:n], inputs.plan, scale, out[:n])
            decode_attention(q[:n], *where, newest, window, Sinks(further[:n], num_sinks))
        if n < len(lengths):
            sink_attention(
                q[n:],
                further[n:],
                inputs.positions[n:],
                cache,
                tables[n:],
                inputs.query_starts if n > 0 else inputs.starts,
                lengths[n:],
                scale,
                max(inputs.max_queries, int(n < inputs.num_decodes)),
                window,
                num_sinks,
                out[n:],
            )
        return out


def stream(decoder: Decoder, config: RopeConfig, window: int, num_sinks: int) -> Streaming:
    """Give all layers of a decoder, which have no windows of their own, this one."""
    first = decoder.blocks[0].attention
    assert isinstance(first, Attention)
    turns = frequencies(config, first.head_size).to(first.cos_sin.device)
    streaming = Streaming(turns, config.attention_factor, window, num_sinks)

    def of(block: Block) -> Block:
        assert isinstance(block.attention, Attention)
        return replace(block, attention=StreamingAttention(block.attention, streaming))

    decoder.blocks = [of(block) for block in decoder.blocks]
    return streaming
