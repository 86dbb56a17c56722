"""A stack of pre-norm blocks, from token ids to logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.layers.attention import Attention, AttentionInputs
from slipstream.layers.dims import Dims
from slipstream.layers.embedding import Embedding, Head
from slipstream.layers.linear import WeightSource
from slipstream.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class Block:
    """Attention and MLP, each on the norm of the residual sum, which is kept beside them."""

    input_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]

    def __call__(
        self, branch: Tensor | None, residual: Tensor, inputs: AttentionInputs, cache: Tensor
    ) -> Tensor:
        """Add the previous block's branch to `residual` in place; return this block's branch."""
        x = self.input_norm(residual) if branch is None else self.input_norm.add(branch, residual)
        x = self.attention(x, inputs, cache)
        return self.mlp(self.mlp_norm.add(x, residual))


class Decoder:
    """Embedding, blocks, final norm and head."""

    def __init__(
        self, w: WeightSource, dims: Dims, blocks: Sequence[Block], ties_embeddings: bool
    ) -> None:
        self.embedding = Embedding(w.at("model.embed_tokens"), dims.vocab_size, dims.hidden_size)
        self.blocks = blocks
        self.norm = Norm(w.at("model.norm"), dims.hidden_size, dims.eps)
        self.head = Head(w.at("lm_head"), self.embedding, ties_embeddings)

    def hidden(
        self,
        token_ids: Tensor,
        inputs: AttentionInputs,
        caches: Sequence[Tensor],
        sample_rows: Tensor,
    ) -> Tensor:
        """`token_ids [n] i64` in; what `head` makes logits of out, `[len(sample_rows), hidden]`.

        `caches[i]` is layer i's, `[num_blocks, num_kv_heads, 2, block_size, head_size]`.
        """
        residual, branch = self.embedding(token_ids), None
        for block, cache in zip(self.blocks, caches, strict=True):
            branch = block(branch, residual, inputs, cache)
        assert branch is not None
        return self.norm.add(branch[sample_rows], residual[sample_rows])
