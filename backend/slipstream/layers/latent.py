"""Latent attention (DeepSeek-AI, 2024): the cache has a latent of each token, no keys or values."""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.attention.latent import latent_attention
from slipstream.kernels.cache import kv_format
from slipstream.kernels.elementwise.rope import rotate
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
        up = _up(w, dims.num_heads * (latent.plain + latent.value), rank)
        sizes = [latent.plain, latent.value]
        keys, values = torch.split(up.view(dims.num_heads, -1, rank), sizes, 1)
        self._to_latents = _each_head(keys, w.deterministic)
        self._of_latents = _each_head(values.transpose(1, 2), w.deterministic)
        size = dims.num_heads * latent.value
        self.out = LinearAdd(Linear.read(w, ("o_proj",), (hidden,), size, bias))

    def __call__(
        self, norm: RowNorm, residual: Residual, inputs: AttentionInputs, cache: Tensor
    ) -> None:
        """`residual [n, hidden] += ` the attention of `norm(residual)`; see `Attention`."""
        x, rows = norm(residual.values), inputs.rows
        cos_sin, places = inputs.angles(self.cos_sin)
        cos, sin = cos_sin[places].unsqueeze(1).chunk(2, dim=-1)
        self._write(self.down(x), (cos, sin), rows.slots, cache)
        q = inputs.keep_wanted(self._queries(x, (cos, sin)), residual)
        n, device = rows.num_decodes, q.device
        single = torch.arange(n, dtype=torch.int32, device=device)
        starts = torch.cat((single, n + rows.query_starts))
        out = torch.empty(*q.shape[:2], self.latent.rank, dtype=q.dtype, device=device)
        where = (cache, rows.block_tables, starts, rows.lengths)
        latent_attention(q, *where, out, self.scale)
        self.out(self._of_latents(out).flatten(1), residual)

    def _queries(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Queries of `x [n, hidden]` as rows of the cache are: `[n, heads, row]`."""
        if self.query_down is not None:
            x = self.query_norm(self.query_down(x))
        q = self.query(x).view(len(x), self.num_heads, -1)
        plain, turning = torch.split(q, [self.latent.plain, self.latent.rotated], -1)
        return torch.cat((self._to_latents(plain), self._turned(turning, angles)), -1)

    def _write(
        self, x: Tensor, angles: tuple[Tensor, Tensor], slots: Tensor, cache: Tensor
    ) -> None:
        """Write rows `[n, row]`, the latent not yet normalised, the key not yet rotated."""
        latent, key = torch.split(x[:, None], [self.latent.rank, self.latent.rotated], -1)
        row = torch.cat((self.norm(latent.flatten(1))[:, None], self._turned(key, angles)), -1)
        keep = slots >= 0
        first, last = row[keep].chunk(2, -1)
        kv_format.write(cache, slots[keep], first, last)

    def _turned(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate `[n, heads, rotated]`, whose pairs lie side by side or half a row apart."""
        if self.latent.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        return rotate(x, *angles).to(x.dtype)


def _up(w: WeightSource, rows: int, rank: int) -> Tensor:
    """Read what makes keys and values of latents, `[rows, rank]`, in the model's dtype."""
    name = "kv_b_proj"
    part = w.quantized(name, rows, rank)
    if part is None:
        return w.tensor(f"{name}.weight", rows, rank)
    w.note("keys and values of latents: dequantised as they are loaded")
    return dequantised(w, [(name, rows)], [part], rank)


def _each_head(matrices: Tensor, is_sliced: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies `[n, heads, a]` by `[heads, a, b]`."""

    def multiply(x: Tensor) -> Tensor:
        return torch.einsum("nha,hab->nhb", x, matrices)

    return sliced(multiply) if is_sliced else multiply
