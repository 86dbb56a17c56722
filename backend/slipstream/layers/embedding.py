"""Token embedding, and the same matrix (or its own) as the head that gives logits."""

import logging

import torch
from torch import Tensor
from torch.nn import functional

from slipstream import quant
from slipstream.errors import CheckpointError
from slipstream.kernels.gemm.op import Matrix
from slipstream.layers.dims import Dims
from slipstream.layers.linear import Linear, NormLinear
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource
from slipstream.quant.matrix import write

_log = logging.getLogger(__name__)


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
    """Logits of every token id: `weight [vocab, hidden]`, which is never quantised."""

    def __init__(self, weight: Tensor, is_sliced: bool) -> None:
        self.weight = weight
        self.product = NormLinear(Linear(quant.named("none"), Matrix(weight), None, is_sliced))

    def __call__(self, norm: Norm, residual: Residual) -> Tensor:
        """Logits of `norm(residual)`, `[n, hidden] -> [n, vocab]`."""
        logits, _ = self.product(norm, residual)
        return logits


def embedding_and_head(
    w: WeightSource, dims: Dims, is_tied: bool, scale: float = 1.0
) -> tuple[Embedding, Head]:
    """The embedding, `model.embed_tokens`, and the head, `lm_head`.

    Tied, they are one matrix, which the checkpoint may have under either name or under both. Where
    it has two that differ, they are not tied, whatever config.json says, as in transformers 5.
    """
    below, above = w.at("model.embed_tokens"), w.at("lm_head")
    if is_tied and w.is_quantised("lm_head"):
        raise CheckpointError(
            "config.json: tie_word_embeddings = true, but lm_head has quantised tensors of its own"
        )
    is_one = is_tied and not (below.has("weight") and above.has("weight"))
    source = above if is_one and above.has("weight") else below
    embedding = Embedding(source, dims.vocab_size, dims.hidden_size, scale)
    if is_one:
        return embedding, Head(embedding.weight, w.deterministic)
    weight = _head_weight(w, above, dims)
    # Where only shapes are checked there are no numbers to compare.
    if is_tied and (weight.is_meta or torch.equal(weight, embedding.weight)):
        weight = embedding.weight
    elif is_tied:
        _log.warning(
            "config.json says tie_word_embeddings = true, but lm_head.weight differs from "
            "model.embed_tokens.weight: each is used as it is"
        )
    return embedding, Head(weight, w.deterministic)


def _head_weight(w: WeightSource, head: WeightSource, dims: Dims) -> Tensor:
    """Read the head's own matrix; a quantised one is dequantised."""
    found = w.quantized("lm_head", dims.vocab_size, dims.hidden_size)
    if found is None:
        return head.tensor("weight", dims.vocab_size, dims.hidden_size)
    w.note(f"the head's weights of {found}: dequantised as they are loaded")
    out = torch.empty(dims.vocab_size, dims.hidden_size, dtype=w.dtype, device=w.device)
    write(found, out)
    return out
