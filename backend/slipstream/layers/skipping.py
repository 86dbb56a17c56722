"""Heads that skip blocks of tokens (block-sparse attention: Child et al., 2019; Phi-3-small).

What a head does not see is left out of its table. So each head of a decode is a row of its own, of
a cache whose blocks are those of one kv head; and so is each head of the queries in one block,
which see the same blocks. Kernels are those of all models: keys are rotated when they are cached,
so where they stand in a table changes no score.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from slipstream.kernels.attention.backend import AttentionBackend, Rows
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.scores import UNCHANGED, Scores
from slipstream.kernels.attention.spec import BY_HEAD
from slipstream.kernels.cache import kv_format
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.dims import SkipConfig


def pages_of(cache: Tensor) -> Tensor:
    """Return a cache as blocks of one kv head each: block `b` of head `h` is `b * heads + h`."""
    return cache.view(-1, 1, *cache.shape[2:])


def _are_written(cache: Tensor) -> bool:
    """Whether blocks of one kv head each must be written as such, not as parts of whole blocks.

    The bytes of a quantised block are not those of its heads, one after the other.
    """
    return kv_format.is_quantized(cache) and cache.shape[1] > 1


class Segments(NamedTuple):
    """Queries of chunks by the block that they stand in; `m` of them, some of which are empty."""

    rows: Tensor  # [m] i64: the chunk of each
    starts: Tensor  # [m] i64: its first query
    sizes: Tensor  # [m] i64: queries
    ends: Tensor  # [m] i64: the position behind its last query; 0: it is empty

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, num_queries: int, block: int) -> Self:
        """Cut chunks, `starts [r + 1]` and `lengths [r]` as in `StepRows`, at multiples of `block`.

        `num_queries` are the most of all chunks together. There are as many segments as these can
        give, so that the device is not waited for.
        """
        ends, begins = lengths.long(), starts[:-1].long()
        counts = torch.where(ends > 0, starts[1:] - begins, 0)
        positions = ends - counts  # of the first queries
        each = torch.where(counts > 0, (ends - 1) // block - positions // block + 1, 0)
        behind = each.cumsum(0)
        most = min(num_queries, num_queries // block + 2 * len(lengths))
        number = torch.arange(most, device=lengths.device)
        rows = torch.searchsorted(behind, number, right=True).clamp(max=len(lengths) - 1)
        at = positions[rows] // block + number - (behind - each)[rows]
        first = torch.maximum(at * block, positions[rows])
        end = torch.minimum((at + 1) * block, ends[rows])
        is_there = number < behind[-1]
        sizes = torch.where(is_there, end - first, 0)
        begin = begins[rows] + first - positions[rows]
        return cls(rows, begin, sizes, torch.where(is_there, end, 0))

    def order(self, num_rows: int, heads: int) -> tuple[Tensor, Tensor]:
        """Return where each head of each segment begins, `[m * heads + 1] i32`, and for each row
        from there on which of `[num_rows, heads]` it is, `[num_rows * heads] i64`; behind them
        come numbers that are above all.
        """
        behind = self.sizes.cumsum(0)
        each = self.sizes[:, None] * torch.arange(heads, device=behind.device)
        begins = (heads * (behind - self.sizes)[:, None] + each).flatten()
        begins = torch.cat((begins, heads * behind[-1:])).to(torch.int32)
        number = torch.arange(num_rows * heads, device=behind.device)
        segment = torch.searchsorted(behind * heads, number, right=True)
        is_there = segment < len(behind)
        segment = segment.clamp(max=len(behind) - 1)
        size = self.sizes[segment].clamp(min=1)
        own = number - heads * (behind - self.sizes)[segment]
        place = (self.starts[segment] + own % size) * heads + own // size
        return begins, torch.where(is_there, place, num_rows * heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippingInputs(AttentionInputs):
    """`rows` are the step's, attention is that of `by_head`, whose rows are a head's."""

    maker: "Skipping"
    cache: Tensor  # of any of the layers
    by_head: AttentionInputs
    order: Tensor | None  # [n * heads] i64: which query and head each row is; None: in order

    @property
    def rotates_decodes(self) -> bool:
        """Return False: several rows have the same newest token."""
        return False

    def written(self, cache: Tensor) -> Tensor:
        """Return a layer's cache as keys and values are written to it."""
        return pages_of(cache) if _are_written(cache) else cache

    def of_last_layer(self, sample_rows: Tensor, sample_starts: Tensor) -> "SkippingInputs":
        """Return the inputs of the last layer; see `AttentionInputs`."""
        cut = AttentionInputs.of_last_layer(self, sample_rows, sample_starts)
        made = self.maker.inputs(self.cache, cut.rows, len(sample_rows))
        return replace(made, wanted=sample_rows)

    def attend(
        self,
        q: Tensor,
        newest: Newest | None,
        cache: Tensor,
        scale: float,
        changed: Scores = UNCHANGED,
    ) -> Tensor:
        """Attend with each head to the blocks that it sees; see `AttentionInputs`."""
        assert newest is None, "decodes are rotated before"
        pages, rows = pages_of(cache), q.reshape(-1, 1, q.shape[2])
        if self.order is None:
            return self.by_head.attend(rows, None, pages, scale, changed).view(q.shape)
        last = len(rows) - 1
        found = self.by_head.attend(rows[self.order.clamp(max=last)], None, pages, scale, changed)
        out = rows.new_empty((len(rows) + 1, *rows.shape[1:]))  # and a row of what is none
        out[self.order] = found
        return out[:-1].view(q.shape)


class Skipping:
    """Makes the inputs of layers whose heads skip blocks.

    Args:
        config: what they skip.
        backend: of attention; its spec says heads and blocks of the cache.
        capacity: blocks of a table.
        device: of the step's tensors.
    """

    def __init__(
        self, config: SkipConfig, backend: AttentionBackend, capacity: int, device: torch.device
    ) -> None:
        spec = backend.spec
        assert config.tokens % spec.block_size == 0, "the backend refuses others"
        self._config = config
        self._backend = type(backend)(
            replace(spec, num_heads=1, num_kv_heads=1, windows=(0,), form=BY_HEAD)
        )
        self._deterministic, self._heads = spec.deterministic, spec.num_heads
        self._kv_heads, self._pages = spec.num_kv_heads, config.tokens // spec.block_size
        firsts = sorted(set(config.firsts))
        self._firsts = torch.tensor(firsts, device=device)
        self._behind = self._firsts + (1 - config.stride)
        count = -(-capacity // self._pages)
        most = min(count, config.local) + -(-max(0, count - config.local) // config.stride)
        self._entry = torch.arange(most, device=device)  # numbers of blocks that a head sees
        self._far = self._firsts[:, None] + self._entry * config.stride  # which, of the older ones
        self._page = torch.arange(self._pages, device=device)
        self._class = torch.tensor([firsts.index(each) for each in config.firsts], device=device)
        each = spec.num_heads // spec.num_kv_heads
        heads = torch.arange(spec.num_heads, dtype=torch.int32, device=device)
        self._kv_head = heads // each  # of each head

    def sees_all(self, cache: Tensor, rows: StepRows) -> bool:
        """Whether a step's rows may be attended to as those of other layers: it is known that none
        is long enough to skip a token.

        In deterministic mode they never may: bits of a sequence may not depend on others. Nor over
        a cache whose blocks are of one kv head each; `cache` is that of any of the layers.
        """
        if self._deterministic or _are_written(cache):
            return False
        most = self._config.dense_tokens
        if not rows.lengths.is_cuda:
            return not len(rows.lengths) or int(rows.lengths.max()) <= most
        are_known = rows.num_decodes == 0 and len(rows.contexts) > 0
        return are_known and max(length for _, length in rows.contexts) <= most

    def inputs(self, cache: Tensor, rows: StepRows, num_tokens: int) -> SkippingInputs:
        """Make the inputs of a step of `num_tokens` queries; see `AttentionInputs.of`."""
        n, heads, most = rows.num_decodes, self._heads, min(rows.max_queries, self._config.tokens)
        starts, order = rows.query_starts, None
        number, ends = torch.arange(n, device=starts.device), rows.lengths[:n].long()
        if most > 0:
            own = Segments.of(starts, rows.lengths[n:], num_tokens - n, self._config.tokens)
            starts, places = own.order(num_tokens - n, heads)
            decodes = torch.arange(n * heads, device=starts.device)
            order = torch.cat((decodes, places + n * heads)) if n > 0 else places
            number, ends = torch.cat((number, own.rows + n)), torch.cat((ends, own.ends))
        tables, lengths = self._seen(rows.block_tables, number, ends)
        by_head = rows._replace(
            block_tables=tables,
            lengths=lengths,
            query_starts=starts,
            num_decodes=n * heads,
            max_queries=most,
            contexts=(),
        )
        made = AttentionInputs.of(self._backend, pages_of(cache), by_head, 0)
        backend, plan = self._backend, made.plan
        return SkippingInputs(
            backend, rows, plan, 0, maker=self, cache=cache, by_head=made, order=order
        )

    def _seen(self, tables: Tensor, rows: Tensor, ends: Tensor) -> Rows:
        """Return what heads see of `rows [m] i64` of tables, to the last query's `ends [m] i64`.

        Tables are `[m * heads, blocks] i32`; queries stand in one block.
        """
        c, entry = self._config, self._entry
        older = (ends - 1) // c.tokens - (c.local - 1)  # blocks before the local ones
        near = older.clamp(min=0)
        seen = ((older[:, None] - self._behind) // c.stride).clamp(min=0)  # of older ones, by class
        shift = seen - near[:, None]
        blocks = torch.where(entry < seen[..., None], self._far, entry - shift[..., None])
        if self._pages > 1:
            blocks = (blocks[..., None] * self._pages + self._page).flatten(2)
        found = tables[rows[:, None, None], blocks.clamp(max=tables.shape[1] - 1)]
        found = found[:, self._class] * self._kv_heads + self._kv_head[:, None]
        lengths = (shift * c.tokens + ends[:, None]).to(torch.int32)[:, self._class]
        return Rows(found.flatten(0, 1), lengths.flatten())
