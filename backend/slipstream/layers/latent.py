"""Latent attention (DeepSeek-AI, 2024): the cache has a latent of each token, no keys or values."""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.attention.latent_rows import latent_rows
from slipstream.layers.attention import AttentionInputs
from slipstream.layers.dims import Dims, LatentConfig
from slipstream.layers.linear import Linear, LinearAdd
from slipstream.layers.norm import Norm, RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.sliced import sliced
from slipstream.layers.source import WeightSource
from slipstream.quant.auto import dequantised

_EPS = 1e-6  # of norms of latents, whatever that of rows is


class LatentAttention:
    """Attention whose keys and values are made of latents, that of queries if it has one, too.

    The matrix that makes keys of latents multiplies queries, that of values results: so what is
    cached is read as it is.

    Args:
        w: where the matrices are.
        dims: of the model.
        latent: sizes.
        cos_sin: of every position, `[positions, rotated]`.
        bias: whether the matrices that read and make rows have biases.
        scale: of the scores.
    """

    def __init__(
        self,
        w: WeightSource,
        dims: Dims,
        latent: LatentConfig,
        cos_sin: Tensor,
        bias: bool,
        scale: float,
    ) -> None:
        self.latent, self.num_heads = latent, dims.num_heads
        self.cos_sin, self.scale = cos_sin, scale
        hidden, rank = dims.hidden_size, latent.rank
        queries = dims.num_heads * (latent.plain + latent.rotated)
        self.query_down: Linear | None = None
        if latent.query_rank:
            self.query_down = Linear.read(w, ("q_a_proj",), (latent.query_rank,), hidden, bias)
            self.query_norm = Norm(w.at("q_a_layernorm"), latent.query_rank, _EPS)
            self.query = Linear.read(w, ("q_b_proj",), (queries,), latent.query_rank)
        else:
            self.query = Linear.read(w, ("q_proj",), (queries,), hidden)
        row = rank + latent.rotated
        self.down = Linear.read(w, ("kv_a_proj_with_mqa",), (row,), hidden, bias)
        self.norm = Norm(w.at("kv_a_layernorm"), rank, _EPS)
        keys, values = _up(w, dims.num_heads, latent)
        self.to_latents = _each_head(keys, w.deterministic)
        self.of_latents = _each_head(values.transpose(1, 2), w.deterministic)
        size = dims.num_heads * latent.value
        self.out = LinearAdd(Linear.read(w, ("o_proj",), (hidden,), size, bias))

    def __call__(
        self, norm: RowNorm, residual: Residual, inputs: AttentionInputs, cache: Tensor
    ) -> None:
        """`residual [n, hidden] += ` the attention of `norm(residual)`; see `Attention`."""
        x, rows, latent = norm(residual.values), inputs.rows, self.latent
        cos_sin, places = inputs.angles(self.cos_sin)
        q = self._queries(x)
        whole = torch.empty(
            *q.shape[:2], latent.rank + latent.rotated, dtype=q.dtype, device=q.device
        )
        where = (cos_sin, places, rows.slots, cache, q, whole)
        latent_rows(self.down(x), self.norm.weight, *where, _EPS, latent.interleaved)
        # Queries as rows of the cache are.
        whole[..., : latent.rank] = self.to_latents(q[..., : latent.plain])
        out = self._attend(inputs.keep_wanted(whole, residual), inputs, cache)
        self.out(self.of_latents(out).flatten(1), residual)

    def _queries(self, x: Tensor) -> Tensor:
        """Queries of `x [n, hidden]`: `[n, heads, plain + rotated]`."""
        if self.query_down is not None:
            x = self.query_norm(self.query_down(x))
        return self.query(x).view(len(x), self.num_heads, -1)

    def _attend(self, q: Tensor, inputs: AttentionInputs, cache: Tensor) -> Tensor:
        """Means of latents `[n, heads, rank]`, decodes and chunks by an operation each."""
        n, backend = inputs.rows.num_decodes, inputs.backend
        out = torch.empty(*q.shape[:2], self.latent.rank, dtype=q.dtype, device=q.device)
        if n > 0:
            backend.attend_latents(q[:n], cache, inputs.decodes, None, self.scale, out[:n])
        if inputs.chunks.max_queries > 0:
            chunked, chunks = inputs.chunked, inputs.chunks
            backend.attend_latents(q[n:], cache, chunked, chunks, self.scale, out[n:])
        return out


def _up(w: WeightSource, heads: int, latent: LatentConfig) -> tuple[Tensor, Tensor]:
    """Read what makes keys and values of latents, in the model's dtype.

    Returns `[heads, plain, rank]` and `[heads, value, rank]`. A checkpoint has them in one, those
    of each head under one another, or apart, and the former with ranks as rows (GGUF).
    """
    name, rank = "kv_b_proj", latent.rank
    if w.has("k_b_proj.weight"):
        keys = w.tensor("k_b_proj.weight", heads, rank, latent.plain)
        return keys.transpose(1, 2), w.tensor("v_b_proj.weight", heads, latent.value, rank)
    rows = heads * (latent.plain + latent.value)
    part = w.quantized(name, rows, rank)
    if part is None:
        up = w.tensor(f"{name}.weight", rows, rank)
    else:
        w.note("keys and values of latents: dequantised as they are loaded")
        up = dequantised(w, [(name, rows)], [part], rank)
    keys, values = torch.split(up.view(heads, -1, rank), [latent.plain, latent.value], 1)
    return keys, values


def _each_head(matrices: Tensor, is_sliced: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies `[n, heads, a]` by `[heads, a, b]`."""

    def multiply(x: Tensor) -> Tensor:
        return torch.einsum("nha,hab->nhb", x, matrices)

    return sliced(multiply) if is_sliced else multiply
