"""Runs of tokens that sequences of a decode batch share: they lie in the same blocks.

Found on the device from the block tables, once a step, so that one CUDA graph serves any mix.
Attention then reads such a run once for all of them (decode_prefixes.cuh).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

MAX_ROWS = 1024  # of find_prefixes.cu: a thread each; larger batches share nothing
LEVELS, MAX_SPLITS, MAX_SEGMENTS = 3, 8, 256
TILE = 64  # tokens
_OWN_TILE = 32  # of decode_plan.cuh: where a sequence's own part may begin
_MIN_RUN = 4  # tiles that an item has at least, if the run has them
_HEADER, _ITEM = 4, 8  # words
# A run that is read once for all must be so long, and save reading so many tokens. What a step's
# runs save of a layer must be as many bytes as its sequences have of their own, but half of
# _MIN_SAVED_BYTES at least, and those are always enough: what is shared costs a layer some 10 us by
# itself, and to read it for each costs less, since it comes from L2, the more comes from memory
# meanwhile (H200, 256 MB: 3 us gained beside 130 MB, 2 lost beside 290).
_MIN_TOKENS, _MIN_SAVED_TOKENS, _MIN_SAVED_BYTES = 64, 1024, 384 << 20


class Work(NamedTuple):
    """Inputs of the search besides tables and lengths."""

    block_size: int
    num_kv_heads: int
    group_size: int  # query heads of a kv head
    item_rows: int  # query heads of sequences that a CTA takes at once
    num_ctas: int
    min_saved_tokens: int  # by all together; half of it where rows have little of their own

    @classmethod
    def of(cls, cache: Tensor, num_q_heads: int, item_rows: int, num_ctas: int) -> "Work":
        """For a cache of these heads and blocks."""
        _, num_kv_heads, _, block_size, head_size = cache.shape
        token_bytes = num_kv_heads * 2 * head_size * cache.element_size()
        group_size = num_q_heads // num_kv_heads
        saved = -(-_MIN_SAVED_BYTES // token_bytes)
        return cls(block_size, num_kv_heads, group_size, item_rows, num_ctas, saved)

    def max_row_tiles(self, num_rows: int) -> int:
        """Bound the row tiles of all runs together, for one kv head."""
        tiles = -(-num_rows * self.group_size // self.item_rows)
        return min(MAX_SEGMENTS, 2 * tiles + 16)

    def max_items(self, num_rows: int) -> int:
        """Bound the items of a step."""
        return self.num_ctas + self.num_kv_heads * self.max_row_tiles(num_rows)

    def max_states(self, num_rows: int) -> int:
        """Bound what the items of a step leave, each for all heads of a row."""
        tiles = -(-self.num_ctas // self.num_kv_heads) + self.max_row_tiles(num_rows)
        most = -(-self.item_rows // self.group_size) * tiles
        return min(most, num_rows * LEVELS * MAX_SPLITS)


def _places(num_rows: int) -> tuple[int, int]:
    """Return the offsets of members and of items, in words."""
    members = _HEADER + 2 * (num_rows + num_rows % 2)
    return members, members + LEVELS * ((num_rows + 3) // 4 * 4)


def num_words(work: Work, num_rows: int) -> int:
    """Return the size of `find_prefixes`' result: header, two words a row, members, items."""
    return _places(num_rows)[1] + _ITEM * work.max_items(num_rows)


@dataclass
class _Segment:
    """A run of tokens that all members have in the same blocks."""

    leader: int
    begin: int  # tokens
    end: int
    members: list[int]  # rows, the leader first
    first_state: int = 0  # of a row's states, that of the first split
    num_splits: int = 0

    @property
    def num_tiles(self) -> int:
        return -(-(self.end - self.begin) // TILE)

    @property
    def saved(self) -> int:
        """Tokens that need not be read again."""
        return (len(self.members) - 1) * (self.end - self.begin)


@op("block_tables[s,_]:i32, lengths[s]:i32, out[_]:i32")
def find_prefixes(block_tables: Tensor, lengths: Tensor, out: Tensor, work: Work) -> Tensor:
    """Fill `out`, of `num_words`, with what the rows share; as find_prefixes.cu says. Returns it.

    Tokens in the block of the newest one, and later, are never shared.
    """
    out.zero_()
    num_rows = len(lengths)
    segments, first_own = _find(block_tables.tolist(), lengths.tolist(), work)
    least = max(work.min_saved_tokens // 2, _OWN_TILE * _own_tiles(lengths.tolist(), first_own))
    least = max(1, min(work.min_saved_tokens, least))
    if sum(segment.saved for segment in segments) < least:
        return out
    _split(segments, work)
    words = out[_HEADER:]
    counts = [sum(s.num_splits for s in segments if row in s.members) for row in range(num_rows)]
    used = 0
    for row, count in enumerate(counts):
        words[2 * row] = first_own[row] // _OWN_TILE
        words[2 * row + 1] = used * 32 + count
        used += count
    members = [row for segment in segments for row in segment.members]
    items = list(_items(segments, work))
    out[0] = len(items)
    flat = [word for item in items for word in item]
    for place, values in zip(_places(num_rows), (members, flat), strict=True):
        out[place : place + len(values)] = torch.tensor(values, dtype=torch.int32)
    return out


def _find(
    tables: list[list[int]], lengths: list[int], work: Work
) -> tuple[list[_Segment], list[int]]:
    """Return the runs, and for each row the token at which its own part begins.

    Rows with the same next block are a class; what all of a class have in common is a run if that
    pays, else the runs of its classes begin where it would.
    """
    columns = max(1, _OWN_TILE // work.block_size)  # of a unit, by which tables are compared
    unit = columns * work.block_size
    limits = [max(0, length - 1) // unit for length in lengths]
    classes = {0: [row for row in range(len(lengths)) if limits[row] > 0]}
    begin = [0] * len(lengths)  # units that are compared
    own = [0] * len(lengths)  # tokens that are in runs
    found: list[_Segment] = []
    row_tiles = 0
    for _ in range(LEVELS):
        classes = _divide(classes, tables, begin, limits, columns)
        for leader in sorted(classes):
            rows = classes[leader]
            end = min(_common(tables, rows, limits, columns))
            segment = _Segment(leader, own[leader], end * unit, rows)
            is_long = segment.end - segment.begin >= _MIN_TOKENS
            if is_long and segment.saved >= _MIN_SAVED_TOKENS:
                row_tiles += _row_tiles(segment, work)
                if row_tiles <= work.max_row_tiles(len(lengths)):
                    found.append(segment)
                    for row in rows:
                        own[row] = segment.end
            for row in rows:
                begin[row] = end
    return found, own


def _divide(
    classes: dict[int, list[int]],
    tables: list[list[int]],
    begin: list[int],
    limits: list[int],
    columns: int,
) -> dict[int, list[int]]:
    """Return classes by the last block of the next unit, of two rows or more, by first row."""
    divided: dict[tuple[int, int], list[int]] = {}
    for leader, rows in classes.items():
        for row in rows:
            if begin[row] < limits[row]:
                key = (leader, tables[row][(begin[row] + 1) * columns - 1])
                divided.setdefault(key, []).append(row)
    return {rows[0]: rows for rows in divided.values() if len(rows) > 1}


def _common(
    tables: list[list[int]], rows: list[int], limits: list[int], columns: int
) -> Iterator[int]:
    """Return the units that each of the rows has in common with the first."""
    first = tables[rows[0]]
    yield limits[rows[0]]
    for row in rows[1:]:
        count = min(limits[row], limits[rows[0]]) * columns
        pairs = enumerate(zip(first[:count], tables[row][:count], strict=True))
        yield next((i for i, (a, b) in pairs if a != b), count) // columns


def _row_tiles(segment: _Segment, work: Work) -> int:
    return -(-len(segment.members) * work.group_size // work.item_rows)


def _own_tiles(lengths: list[int], first_own: list[int]) -> int:
    """Return the tiles of all rows that no other row has."""
    pairs = zip(lengths, first_own, strict=True)
    return sum(-(-length // _OWN_TILE) - first // _OWN_TILE for length, first in pairs)


def _num_splits(segment: _Segment, tiles: int) -> int:
    """Return the pieces of a run whose items have so many tiles."""
    return min(MAX_SPLITS, -(-segment.num_tiles // tiles))


def _split(segments: list[_Segment], work: Work) -> None:
    """Cut each run so that all CTAs get about as much."""
    tiles = sum(_row_tiles(s, work) * s.num_tiles for s in segments) * work.num_kv_heads
    run = max(_MIN_RUN, -(-tiles // work.num_ctas))
    count = sum(_row_tiles(s, work) * _num_splits(s, run) for s in segments) * work.num_kv_heads
    if count > work.num_ctas:
        run *= 2  # some would get two short items
    for i, segment in enumerate(segments):
        segment.num_splits = _num_splits(segment, run)
        outer = (s for s in segments[:i] if segment.leader in s.members)
        segment.first_state = sum(s.num_splits for s in outer)


def _items(segments: list[_Segment], work: Work) -> Iterator[tuple[int, ...]]:
    """`Item`s of decode_prefixes.cuh."""
    first_member = 0
    for segment in segments:
        num_rows, splits = len(segment.members) * work.group_size, segment.num_splits
        for head in range(work.num_kv_heads):
            for first_row in range(0, num_rows, work.item_rows):
                for i in range(splits):
                    begin = segment.begin + segment.num_tiles * i // splits * TILE
                    end = segment.begin + segment.num_tiles * (i + 1) // splits * TILE
                    state = segment.first_state + i
                    yield (
                        segment.leader, begin, min(end, segment.end), head,
                        first_member, num_rows, first_row, state,
                    )  # fmt: skip
        first_member += len(segment.members)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield jit.variant("attention/find_prefixes.cu")


@find_prefixes.cuda
def _find_prefixes(block_tables: Tensor, lengths: Tensor, out: Tensor, work: Work) -> Tensor:
    num_rows = len(lengths)
    jit.require(0 < num_rows <= MAX_ROWS, f"find_prefixes: {num_rows} rows, not 1 to {MAX_ROWS}")
    is_plain = lengths.is_contiguous() and out.is_contiguous() and out.data_ptr() % 16 == 0
    jit.require(is_plain, "find_prefixes: lengths and out must be contiguous, out aligned")
    is_row = block_tables.stride(1) == 1 or block_tables.shape[1] <= 1
    jit.require(is_row, "find_prefixes: a row of block_tables must be contiguous")
    jit.require(len(out) == num_words(work, num_rows), "find_prefixes: out has another size")
    jit.launch(
        jit.variant("attention/find_prefixes.cu"),
        "find_prefixes",
        (1,),
        -(-num_rows // 32) * 32,
        block_tables,
        block_tables.stride(0),
        lengths,
        out,
        num_rows,
        jit.block_shift(work.block_size),
        work.num_kv_heads,
        work.group_size,
        work.item_rows,
        work.num_ctas,
        work.max_row_tiles(num_rows),
        work.max_items(num_rows),
        work.min_saved_tokens,
    )
    return out
