"""A stack of pre-norm blocks, from token ids to logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.layers.attention import AttentionInputs
from slipstream.layers.dims import Dims
from slipstream.layers.embedding import embedding_and_head
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class AttentionLayer(Protocol):
    """Attention over what is cached and a step's own tokens."""

    def __call__(
        self, norm: Norm, residual: Residual, inputs: AttentionInputs, cache: Tensor
    ) -> None:
        """`residual [n, hidden] += ` the attention of `norm(residual)`, of the rows needed."""


@dataclass(frozen=True, slots=True)
class Block:
    """Attention and MLP, each added to the residual sum of whose norm it is."""

    input_norm: Norm
    attention: AttentionLayer
    mlp_norm: Norm
    mlp: Callable[[Norm, Residual], None]

    def __call__(self, residual: Residual, inputs: AttentionInputs, cache: Tensor) -> None:
        """Apply the block to `residual [n, hidden]`; the last block keeps only rows needed."""
        self.attention(self.input_norm, residual, inputs, cache)
        self.mlp(self.mlp_norm, residual)


class Decoder:
    """Embedding (times `embedding_scale`), blocks, final norm and head."""

    def __init__(
        self,
        w: WeightSource,
        dims: Dims,
        blocks: Sequence[Block],
        ties_embeddings: bool,
        embedding_scale: float = 1.0,
        norms_plus_one: bool = False,
    ) -> None:
        self.embedding, self.head = embedding_and_head(w, dims, ties_embeddings, embedding_scale)
        self.blocks = blocks
        self.norm = Norm(w.at("model.norm"), dims.hidden_size, dims.eps, norms_plus_one)

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
        residual = Residual(self.embedding(token_ids))
        for block, where, cache in zip(self.blocks, inputs, caches, strict=True):
            block(residual, where, cache)
        return residual
