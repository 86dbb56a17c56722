"""Endless sequences: attention over the first tokens and a window of the last.

See `kernels/attention/sinks.py`. Positions grow without bound, so angles are made for a step's
tokens alone, in fp64: differences of large ones are as exact as those of small ones. Weights, cache
and layers are those of any other model; only a step's inputs differ.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from slipstream.kernels.attention.backend import AttentionBackend, Chunks, Rows
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.prefill import SinkRows
from slipstream.kernels.attention.scores import UNCHANGED, Scores
from slipstream.kernels.attention.sinks import Sinks
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.dims import RopeConfig
from slipstream.layers.rope import cos_sin_at, frequencies, magnitudes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingInputs(AttentionInputs):
    """`rows.positions` are those in the sequence, all else is of its table, which lacks tokens.

    In the last layer `positions` and `further` are those of the `n` tokens that are needed.
    """

    turns: Tensor  # [n, d] f32: cosines and sines of the positions
    further: Tensor  # [n, d] f32: from there to the positions in the cache
    every: Tensor  # [n] i64: 0, 1, ...
    starts: Tensor  # [s + 1] i32: `query_starts` where decodes are chunks, too

    def of_last_layer(self, sample_rows: Tensor, sample_starts: Tensor) -> Self:
        """Return the inputs of the last layer; see `AttentionInputs`."""
        decodes = self.starts[: self.rows.num_decodes]
        cut = AttentionInputs.of_last_layer(self, sample_rows, sample_starts)
        return replace(
            cut,
            rows=cut.rows._replace(positions=self.rows.positions[sample_rows]),
            further=self.further[sample_rows],
            starts=torch.cat((decodes, self.rows.num_decodes + sample_starts)),
        )

    @property
    def num_single(self) -> int:
        """Rows that attend as decodes: none without a plan."""
        return self.rows.num_decodes if len(self.plan) > 0 else 0

    def angles(self, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of this step's tokens alone."""
        return self.turns, self.every

    def attend(
        self,
        q: Tensor,
        newest: Newest | None,
        cache: Tensor,
        scale: float,
        changed: Scores = UNCHANGED,
    ) -> Tensor:
        """Attend over sinks and window; see `AttentionInputs`."""
        assert not changed.changes, "no backend streams where scores are changed"
        n, rows, num_sinks = self.num_single, self.rows, self.backend.spec.num_sinks
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n > 0:
            sinks = Sinks(self.further[:n], num_sinks)
            where = (q[:n], cache, *self.decodes, self.plan, scale, out[:n])
            self.backend.decode(*where, newest, self.window, sinks, rows.has_drafts)
        if n < len(rows.lengths):
            most = max(rows.max_queries, int(n < rows.num_decodes))
            chunks = Chunks(rows.query_starts if n > 0 else self.starts, most)
            turned = SinkRows(num_sinks, self.further[n:], rows.positions[n:])
            chunked = Rows(rows.block_tables[n:], rows.lengths[n:])
            self.backend.prefill(q[n:], cache, chunked, chunks, scale, out[n:], self.window, turned)
        return out


class Streaming:
    """Makes the inputs of steps whose sequences stream.

    Args:
        config: of the rotation.
        backend: its spec says window and sinks.
        device: of the step's tensors.
    """

    def __init__(self, config: RopeConfig, backend: AttentionBackend, device: torch.device) -> None:
        self._backend = backend
        size = backend.spec.head_size
        self._factors = magnitudes(config, size).to(device)
        self._window = backend.spec.stream_window
        self._frequencies = frequencies(config, size).to(device)

    def places(self, positions: Tensor) -> Tensor:
        """Return the cache positions of the newest tokens, from their positions in sequences."""
        return positions.clamp(max=self._window - 1)

    def inputs(self, cache: Tensor, rows: StepRows) -> StreamingInputs:
        """Make the inputs of a step, its plan and its angles; see `AttentionInputs.of`."""
        positions, n = rows.positions, rows.num_decodes
        places = self.places(positions)
        decodes = torch.arange(n, dtype=torch.int32, device=positions.device)
        single = Rows(rows.block_tables[:n], rows.lengths[:n])
        return StreamingInputs(
            self._backend,
            rows,
            self._backend.plan(cache, single, self._window),
            self._window,
            turns=cos_sin_at(self._frequencies, positions) * self._factors,
            further=cos_sin_at(self._frequencies, places - positions),
            every=torch.arange(len(positions), device=positions.device),
            starts=torch.cat((decodes, n + rows.query_starts)),
        )
