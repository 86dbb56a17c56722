"""Token embedding, and the same matrix (or its own) as the head that gives logits."""

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.errors import CheckpointError
from slipstream.kernels.linear import norm_linear
from slipstream.layers.norm import Norm
from slipstream.layers.sliced import in_slices
from slipstream.layers.source import WeightSource


class Embedding:
    """A row for each token id, times `scale`, which is rounded as the weights are."""

    def __init__(
        self, w: WeightSource, vocab_size: int, hidden_size: int, scale: float = 1.0
    ) -> None:
        self.weight = w.tensor("weight", vocab_size, hidden_size)
        self._scale = float(torch.tensor(scale, dtype=self.weight.dtype))

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[n] i64 -> [n, hidden]`."""
        rows = functional.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows * self._scale


class Head:
    """Logits of every token id."""

    def __init__(self, w: WeightSource, embedding: Embedding, is_tied: bool) -> None:
        vocab_size, hidden_size = embedding.weight.shape
        self._is_sliced = w.deterministic
        self.weight = embedding.weight
        if not is_tied or w.has("weight"):
            self.weight = w.tensor("weight", vocab_size, hidden_size)
        has_numbers = not self.weight.is_meta  # it has none where only shapes are checked
        if is_tied and has_numbers and not torch.equal(self.weight, embedding.weight):
            raise CheckpointError(
                "config.json: tie_word_embeddings = True, but lm_head.weight differs from "
                "model.embed_tokens.weight"
            )
        if is_tied:
            self.weight = embedding.weight

    def of_norm(self, norm: Norm, x: Tensor) -> Tensor:
        """Of `norm(x)`, `[n, hidden] -> [n, vocab]`."""

        def product(rows: Tensor) -> Tensor:
            settings = (norm.eps, None, norm.plus_one)
            return norm_linear(rows, norm.weight, self.weight, *settings)

        return in_slices(product, x) if self._is_sliced else product(x)
