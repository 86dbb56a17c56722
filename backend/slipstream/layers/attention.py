"""Attention over the paged cache: one stacked projection in, rotation and cache write, one out."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from slipstream.kernels.attention.backend import AttentionBackend, Chunks, Rows
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.scores import UNCHANGED, Scores
from slipstream.kernels.cache.kv_format import Static
from slipstream.kernels.elementwise import rope
from slipstream.kernels.elementwise.scales import Scales
from slipstream.layers.cache_scales import static_scales
from slipstream.layers.dims import Dims
from slipstream.layers.linear import Linear, LinearAdd, NormLinear
from slipstream.layers.norm import LayerNorm, Norm, PartNorm, RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class StepRows(NamedTuple):
    """A step's tokens and rows, decodes (one token each) first, then chunks.

    `s` rows, of which `num_decodes` are decodes; `n` tokens.
    """

    positions: Tensor  # [n] i64
    slots: Tensor  # [n] i64, where each token's K and V go
    block_tables: Tensor  # [s, blocks] i32
    query_starts: Tensor  # [s - num_decodes + 1] i32, of the chunks, counted from their first token
    lengths: Tensor  # [s] i32, cached tokens after this step's write
    num_decodes: int
    max_queries: int  # longest chunk, 0 without chunks
    has_drafts: bool = False  # decodes attend to what other decodes of the step write
    # Queries and cached tokens of each chunk, where the host knows them of this step.
    contexts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of attention besides the tokens of a step; made once a step for all layers that have
    the same window and table.
    """

    backend: AttentionBackend
    rows: StepRows
    plan: Tensor  # of the decodes
    window: int  # tokens that a query sees, its own included; 0: all
    wanted: Tensor | None = None  # [r] i64: the tokens whose output is needed; None: all
    decodes: Rows = field(init=False)  # cut once, for all layers
    chunked: Rows = field(init=False)
    chunks: Chunks = field(init=False)

    def __post_init__(self) -> None:
        n, tables, lengths = self.rows.num_decodes, self.rows.block_tables, self.rows.lengths
        object.__setattr__(self, "decodes", Rows(tables[:n], lengths[:n]))
        object.__setattr__(self, "chunked", Rows(tables[n:], lengths[n:]))
        unpacked = self.backend.num_unpacked(self.rows.contexts, self.window)
        chunks = Chunks(self.rows.query_starts, self.rows.max_queries, unpacked)
        object.__setattr__(self, "chunks", chunks)

    @classmethod
    def of(
        cls, backend: AttentionBackend, cache: Tensor, rows: StepRows, window: int
    ) -> "AttentionInputs":
        """Make the inputs and their plan; `cache` is that of any of the layers.

        Everything that a step's attention reads must have been written, or be in the stream.
        """
        inputs = cls(backend, rows, rows.lengths, window)  # no plan yet: it is of `decodes`
        object.__setattr__(inputs, "plan", backend.plan(cache, inputs.decodes, window))
        return inputs

    def with_table(self, slots: Tensor, block_tables: Tensor) -> Self:
        """Return the same step for layers of another table, whose plan is of lengths alone."""
        return replace(self, rows=self.rows._replace(slots=slots, block_tables=block_tables))

    def of_last_layer(self, sample_rows: Tensor, sample_starts: Tensor) -> Self:
        """Return the inputs of the last layer, whose output is wanted of `sample_rows [r] i64`.

        These are all decodes and then, for some of the chunks, their last token; `sample_starts`
        is what `query_starts` is of them.
        """
        most = min(1, self.rows.max_queries)
        rows = self.rows._replace(query_starts=sample_starts, max_queries=most, contexts=())
        return replace(self, wanted=sample_rows, rows=rows)

    def keep_wanted(self, q: Tensor, residual: Residual) -> Tensor:
        """Keep, of the queries `[n, heads, d]` and of `residual`, those whose output is wanted."""
        if self.wanted is None:
            return q
        residual.keep(self.wanted)
        return q[self.wanted]

    @property
    def rotates_decodes(self) -> bool:
        """Whether decodes may be rotated and cached by their attention."""
        return self.backend.rotates_decodes and not self.rows.has_drafts

    @property
    def num_single(self) -> int:
        """Rows that attend as decodes; all after them attend as chunks."""
        return self.rows.num_decodes

    def written(self, cache: Tensor) -> Tensor:
        """Return a layer's cache as keys and values are written to it."""
        return cache

    def angles(self, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, and each token's row of them; `cos_sin` is of every position."""
        return cos_sin, self.rows.positions

    def attend(
        self,
        q: Tensor,
        newest: Newest | None,
        cache: Tensor,
        scale: float,
        changed: Scores = UNCHANGED,
    ) -> Tensor:
        """Attention of `q [n, heads, d]`, decodes and chunks by an operation each; `[n, heads, d]`.

        `newest` of the decodes is rotated and cached on the way, if given. `changed` are scores.
        """
        n, window = self.rows.num_decodes, self.window
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n > 0:
            self.backend.decode(
                *(q[:n], cache, *self.decodes, self.plan, scale, out[:n], newest, window),
                reads_step=self.rows.has_drafts,
                changed=changed,
            )
        if self.chunks.max_queries > 0:
            chunks = (self.chunked, self.chunks, scale, out[n:], window, None, changed)
            self.backend.prefill(q[n:], cache, *chunks)
        return out


class Prefix(Protocol):
    """Keys and values that take the place of some of a step's."""

    def put(self, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Replace rows of `k` and `v`, `[n, heads, d]`, in place, before `k` is rotated."""


class HeadNorm:
    """A norm of queries or of keys, `[n, heads, d]`.

    Args:
        norm: of rows of `size` numbers, or of rows and heads.
        size: `d`: each head is a row; `heads * d`: all of them together are.
    """

    def __init__(self, norm: RowNorm, size: int) -> None:
        self.norm = norm
        self._size = size

    def in_rotation(self, head_size: int) -> Tensor | None:
        """Return the weight, if the kernel that rotates can normalise so; else None."""
        norm = self.norm
        if not isinstance(norm, Norm) or norm.plus_one or self._size != head_size:
            return None
        return norm.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `[n, heads, d]`."""
        if self._size == x.shape[-1] and isinstance(self.norm, LayerNorm | PartNorm):
            return self.norm(x)
        return self.norm(x.reshape(-1, self._size)).view(x.shape)


def _in_rotation(
    norms: tuple[HeadNorm, HeadNorm] | None, head_size: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the weights of norms that the kernel of the rotation applies; else None twice."""
    if norms is None:
        return None, None
    q_norm, k_norm = (norm.in_rotation(head_size) for norm in norms)
    # Of a single key head, the norm of all heads looks like that of each; queries' differs.
    return (None, None) if q_norm is None or k_norm is None else (q_norm, k_norm)


class Attention:
    """Grouped-query attention (Ainslie et al., 2023); MHA and MQA are its ends.

    Args:
        w: where the matrices are.
        dims: of the model.
        cos_sin: of every position, `[positions, head_size]`.
        qkv_bias, out_bias: whether these matrices have biases.
        qk_norms: of every head's query and of its key, before rotation (Qwen3).
        out_norm: of what is added to the residual sum (Gemma).
        scale: of the scores of queries and keys; None: `head_size ** -0.5`.
        inputs: numbers of a token that the projection reads; None: the hidden size.
        most: queries, keys and values are cut to -most .. most; None: not cut.
        changed: how scores are changed.
        has_sink_scores: whether heads have `sinks` in the softmax (gpt-oss).
        are_late: whether `qk_norms` come behind the rotation, which has them then (Hunyuan).
        factors: of rotated queries by position, `[positions] f32` (Ministral 3).
        has_two_positions: whether tokens have two (ChatGLM 1); steps have their angles then.
    """

    def __init__(
        self,
        w: WeightSource,
        dims: Dims,
        cos_sin: Tensor,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norms: tuple[HeadNorm, HeadNorm] | None = None,
        out_norm: RowNorm | None = None,
        scale: float | None = None,
        inputs: int | None = None,
        most: float | None = None,
        changed: Scores = UNCHANGED,
        has_sink_scores: bool = False,
        are_late: bool = False,
        factors: Tensor | None = None,
        has_two_positions: bool = False,
    ) -> None:
        size = dims.head_size
        heads = (dims.num_heads, dims.num_kv_heads, dims.num_kv_heads)
        self.sizes = [count * size for count in heads]
        self.head_size = size
        self.cos_sin = cos_sin
        self.scale = size**-0.5 if scale is None else scale
        names = ("q_proj", "k_proj", "v_proj")
        qkv = Linear.read(w, names, self.sizes, inputs or dims.hidden_size, qkv_bias)
        out = Linear.read(w, ("o_proj",), (dims.hidden_size,), self.sizes[0], out_bias)
        # The kernel of the rotation has the commonest norms; all others come before it.
        self.q_norm, self.k_norm = _in_rotation(qk_norms, size)
        self.early_norms = qk_norms if self.q_norm is None and qk_norms else ()
        self._most = most
        leaves_scales = not self.early_norms and most is None
        self.qkv = NormLinear(qkv, leaves_scales=leaves_scales)
        self.out = LinearAdd(out, out_norm)
        self.eps = dims.eps
        self.static = static_scales(w)
        sinks = w.tensor("sinks", dims.num_heads).float() if has_sink_scores else None
        self.changed = changed._replace(sinks=sinks)
        self.are_late, self.factors = are_late, factors
        self.has_two_positions = has_two_positions
        assert not self.early_norms or not (are_late or factors is not None), "stages of a kernel"
        self._rotates_early = qk_norms is not None or factors is not None
        self.prefix: Prefix | None = None  # of adapters

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the rotation's norms comes between projection, attention and sum.

        Scores may be changed.
        """
        is_early = bool(self.early_norms) or self._most is not None
        return not is_early and self.static is None

    def __call__(
        self, norm: RowNorm, residual: Residual, inputs: AttentionInputs, cache: Tensor
    ) -> None:
        """`residual [n, hidden] += ` the attention of `norm(residual)`.

        Writes this step's K and V into the layer's `cache`. `residual` keeps only the rows
        whose output is needed.
        """
        self.add(self.project(norm, residual), residual, inputs, cache)

    def add(
        self,
        projected: tuple[list[Tensor], Scales | None],
        residual: Residual,
        inputs: AttentionInputs,
        cache: Tensor,
    ) -> None:
        """`residual += ` the attention of what `project` returned; see `__call__`."""
        (q, k, v), scales = projected
        if self.prefix is not None and scales is None:
            self.prefix.put(k, v, *inputs.angles(self.cos_sin))
        newest = self._rotate(q, k, v, scales, inputs, cache)
        q = inputs.keep_wanted(q, residual)
        out = inputs.attend(q, newest, cache, self.scale_of(cache), self.changed)
        self.out(self.unscaled(out, cache).flatten(1), residual)

    def _rotate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: Scales | None,
        inputs: AttentionInputs,
        cache: Tensor,
    ) -> Newest | None:
        """Rotate queries and write K and V; return what the decodes' attention has yet to do.

        It does so itself where nothing but rotation comes between projection and attention.
        """
        (cos_sin, places), slots = inputs.angles(self.cos_sin), inputs.rows.slots
        newest, first = None, 0
        if inputs.rotates_decodes and not self._rotates_early and scales is None:
            first = inputs.num_single
            newest = Newest(k[:first], v[:first], cos_sin)
        if first < q.shape[0]:
            if first > 0:
                q, k, v, places, slots = (x[first:] for x in (q, k, v, places, slots))
            static = self.static_of(cache)
            norms = self.q_norm, self.k_norm, self.eps
            stages = rope.HeadStages(scales, *norms, static, self.are_late, self.factors)
            blocks = inputs.written(cache)
            rope.rope_and_cache(q, k, v, cos_sin, places, slots, blocks, stages)
        return newest

    def static_of(self, cache: Tensor) -> Static | None:
        """The checkpoint's scales of the cache, if it has any and this is of their format."""
        return self.static if cache.dtype == torch.float8_e4m3fn else None

    def scale_of(self, cache: Tensor) -> float:
        """Return the factor of scores of queries and what is cached of keys."""
        static = self.static_of(cache)
        return self.scale if static is None else self.scale * static.k

    def unscaled(self, out: Tensor, cache: Tensor) -> Tensor:
        """Means of what is cached of values to means of values, in place."""
        static = self.static_of(cache)
        return out if static is None else out.mul_(static.v)

    def project(self, norm: RowNorm, residual: Residual) -> tuple[list[Tensor], Scales | None]:
        """Queries, keys and values of `norm(residual)`, `[n, heads, d]` each, and their scales."""
        qkv, scales = self.qkv(norm, residual)
        if self._most is not None:
            qkv = qkv.clamp(-self._most, self._most)
        parts = torch.split(qkv, self.sizes, dim=-1)
        q, k, v = [part.view(len(residual), -1, self.head_size) for part in parts]
        if self.early_norms:
            q, k = (norm(x) for norm, x in zip(self.early_norms, (q, k), strict=True))
        return [q, k, v], scales
