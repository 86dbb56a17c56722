"""A stack of pre-norm blocks, from token ids to logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.layers.attention import Attention, AttentionInputs
from slipstream.layers.embedding import Embedding, Head
from slipstream.layers.mlp import TwoStepMLP
from slipstream.layers.norm import RowNorm, identity
from slipstream.layers.residual import Residual


class AttentionLayer(Protocol):
    """Attention over what is cached and a step's own tokens."""

    def __call__(
        self, norm: RowNorm, residual: Residual, inputs: AttentionInputs, cache: Tensor
    ) -> None:
        """`residual [n, hidden] += ` the attention of `norm(residual)`, of the rows needed."""


@dataclass(frozen=True, slots=True)
class Block:
    """Attention and MLP, each added to the residual sum of whose norm it is."""

    input_norm: RowNorm
    attention: AttentionLayer
    mlp_norm: RowNorm
    mlp: Callable[[RowNorm, Residual], None]

    def __call__(self, residual: Residual, inputs: AttentionInputs, cache: Tensor) -> None:
        """Apply the block to `residual [n, hidden]`; the last block keeps only rows needed."""
        self.attention(self.input_norm, residual, inputs, cache)
        self.mlp(self.mlp_norm, residual)


@dataclass(frozen=True, slots=True)
class NormedBlock(Block):
    """A block whose residual sum is its norm, to which attention and MLP are added."""

    def __call__(self, residual: Residual, inputs: AttentionInputs, cache: Tensor) -> None:
        """Apply the block; see `Block`."""
        residual.values.copy_(self.input_norm(residual.values))
        self.attention(identity, residual, inputs, cache)
        residual.values.copy_(self.mlp_norm(residual.values))
        self.mlp(identity, residual)


@dataclass(frozen=True, slots=True)
class ScaledNormedBlock:
    """A `NormedBlock` in whose sum norms are multiplied by a factor, but not where they are read.

    That is `factor * norm(x) + f(norm(x))` (ChatGLM 1).
    """

    input_norm: RowNorm
    attention: Attention
    mlp_norm: RowNorm
    mlp: TwoStepMLP
    factor: float

    def __call__(self, residual: Residual, inputs: AttentionInputs, cache: Tensor) -> None:
        """Apply the block; see `Block`."""
        normed = self._normed(self.input_norm, residual)
        self.attention.add(self.attention.project(identity, normed), residual, inputs, cache)
        normed = self._normed(self.mlp_norm, residual)
        self.mlp.down(self.mlp.inner(identity, normed), residual)

    def _normed(self, norm: RowNorm, residual: Residual) -> Residual:
        """Return the norm of the sum, which takes its place times the factor."""
        values = residual.values
        normed = norm(values)
        torch.mul(normed, self.factor, out=values)
        return Residual(normed)


@dataclass(frozen=True, slots=True)
class PostNormBlock(Block):
    """A block that normalises the sum itself, behind attention and behind the MLP (post-norm)."""

    def __call__(self, residual: Residual, inputs: AttentionInputs, cache: Tensor) -> None:
        """Apply the block; see `Block`."""
        self.attention(identity, residual, inputs, cache)
        residual.values.copy_(self.input_norm(residual.values))
        self.mlp(identity, residual)
        residual.values.copy_(self.mlp_norm(residual.values))


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """Attention and MLP of norms of the same sum, both added to it (Wang and Komatsuzaki, 2021).

    The two norms may be one.
    """

    input_norm: RowNorm
    attention: Attention
    mlp_norm: RowNorm
    mlp: TwoStepMLP

    def __call__(self, residual: Residual, inputs: AttentionInputs, cache: Tensor) -> None:
        """Apply the block; see `Block`. The MLP is of the rows that the last block keeps."""
        projected = self.attention.project(self.input_norm, residual)
        wanted = inputs.wanted
        before = residual if wanted is None else Residual(residual.values[wanted])
        inner = self.mlp.inner(self.mlp_norm, before)
        self.attention.add(projected, residual, inputs, cache)
        self.mlp.down(inner, residual)


AnyBlock = Block | ParallelBlock | ScaledNormedBlock


class StepDecoder(Protocol):
    """What makes the logits of a step; see `Decoder`, which it is of all families."""

    def hidden(
        self, token_ids: Tensor, inputs: Sequence[AttentionInputs], caches: Sequence[Tensor]
    ) -> Residual:
        """Return states `[n, hidden]` of `token_ids [n] i64`, or of the rows that are wanted."""

    def logits(self, residual: Residual) -> Tensor:
        """Return the logits of states, `[n, hidden] -> [n, vocab]`."""


InTurn = Callable[[Sequence[AnyBlock], Residual, Sequence[AttentionInputs], Sequence[Tensor]], None]


class Whole(Protocol):
    """All blocks of a decoder in one call."""

    def run(
        self,
        blocks: Sequence[AnyBlock],
        x: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[Tensor],
    ) -> Tensor | None:
        """Return the sum behind `blocks`, of `x [n, hidden]`; None, and `x` as it was: not so."""


def one_by_one(
    blocks: Sequence[AnyBlock],
    residual: Residual,
    inputs: Sequence[AttentionInputs],
    caches: Sequence[Tensor],
) -> None:
    """Apply blocks to `residual [n, hidden]`, each with its inputs and its cache."""
    for block, where, cache in zip(blocks, inputs, caches, strict=True):
        block(residual, where, cache)


class Decoder:
    """Embedding, blocks, final norm and head; `whole` are the blocks in one, where they can be.

    `in_turn` applies them where they are not: see `one_by_one`, which it is or does the same as.
    """

    whole: Whole | None = None

    def __init__(
        self, embedding: Embedding, blocks: Sequence[AnyBlock], norm: RowNorm, head: Head
    ) -> None:
        self.embedding, self.head = embedding, head
        self.blocks = blocks
        self.norm = norm
        self.in_turn: InTurn = one_by_one

    def __call__(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[Tensor],
    ) -> Tensor:
        """Return logits of `token_ids [n] i64`: `[n, vocab]`, or only the rows that `inputs` of the
        last layer wants.
        """
        return self.logits(self.hidden(token_ids, inputs, caches))

    def logits(self, residual: Residual) -> Tensor:
        """Return the logits of rows of the last sum, `[n, hidden] -> [n, vocab]`."""
        return self.head(self.norm, residual)

    def hidden(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[Tensor],
    ) -> Residual:
        """Return the sum behind the last block, of all rows or those that its inputs want.

        `inputs[i]` and `caches[i]` are layer i's; a cache is
        `[num_blocks, num_kv_heads, 2, block_size, head_size]`. All but the last want all rows.
        """
        rows = self.embedding(token_ids, inputs[0].rows.positions)
        if self.whole is not None:
            found = self.whole.run(self.blocks, rows, inputs, caches)
            if found is not None:
                return Residual(found)
        residual = Residual(rows)
        self.in_turn(self.blocks, residual, inputs, caches)
        return residual
