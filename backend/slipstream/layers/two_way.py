"""Prompts whose tokens see each other, with two positions a token (ChatGLM 1).

A step has a row for each token of a prompt, as long as what the token sees. So attention is that of
decodes and of chunks of one token, over keys and values that the step has written before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.attention.backend import AttentionBackend, Rows
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.dims import RopeConfig
from slipstream.layers.rope import frequencies

SECOND = 32  # the bit of a token's positions from which on the second is


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoWayInputs(AttentionInputs):
    """`rows.positions` have two positions each, all else is of the rows."""

    turns: Tensor  # [n, d] f32: cosines and sines of both positions
    every: Tensor  # [n] i64: 0, 1, ...

    def angles(self, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of this step's tokens alone."""
        return self.turns, self.every


class TwoWays:
    """Makes the inputs of steps whose tokens have two positions.

    Args:
        config: of the rotation.
        backend: of attention.
        device: of the step's tensors.
    """

    def __init__(self, config: RopeConfig, backend: AttentionBackend, device: torch.device) -> None:
        assert config.rotated is not None, "the halves of a head are known"
        self._backend = backend
        self._frequencies = frequencies(config, backend.spec.head_size).double().to(device)
        self._is_second = torch.arange(len(self._frequencies), device=device) >= config.rotated // 4

    def turns(self, positions: Tensor) -> Tensor:
        """Cosines and sines `[n, d] f32` of `positions [n] i64`."""
        first, second = positions & ((1 << SECOND) - 1), positions >> SECOND
        where = torch.where(self._is_second, second[:, None], first[:, None])
        angles = where.double() * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1).float()

    def inputs(self, cache: Tensor, rows: StepRows) -> TwoWayInputs:
        """Make the inputs of a step, its plan and its angles; see `AttentionInputs.of`."""
        n = rows.num_decodes
        return TwoWayInputs(
            self._backend,
            rows,
            self._backend.plan(cache, Rows(rows.block_tables[:n], rows.lengths[:n]), 0),
            0,
            turns=self.turns(rows.positions),
            every=torch.arange(len(rows.positions), device=rows.positions.device),
        )
