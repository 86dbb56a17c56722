"""How prefill_items.cuh cuts items into parts, in Python."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from slipstream.kernels.attention.prefill import wgmma_tile
from slipstream.kernels.runtime import jit

Mix = list[tuple[int, int]]  # (queries, tokens cached after them) of each sequence


def constant(name: str) -> int:
    """Of prefill_items.cuh."""
    text = (jit.FOLDER / "attention/sm90/prefill_items.cuh").read_text()
    found = re.search(rf"constexpr int {name} = ([^;]+);", text)
    assert found is not None
    return int(eval(found[1]))


ROWS, TILE = constant("ITEM_ROWS"), wgmma_tile(128)
MIN_PART, MOST_PARTS = constant("MIN_PART"), constant("MOST_PARTS")
PART_TILES, UNCUT = constant("PART_TILES"), constant("UNCUT")


class Part(NamedTuple):
    """A part of an item, or all of it."""

    sequence: int
    kv_head: int
    first_row: int
    begin: int  # tiles
    end: int
    part: int
    parts: int
    first_part: int


def up(a: int, b: int) -> int:
    return -(-a // b)


class Chunk:
    """Queries of a sequence."""

    def __init__(self, queries: int, length: int, group: int) -> None:
        is_real = length > 0 and queries > 0
        self.group = group
        self.num_rows = queries * group if is_real else 0
        self.position = length - queries if is_real else 0
        self.length = length if is_real else 0
        self.row_tiles, self.tiles = up(self.num_rows, ROWS), up(self.length, TILE)
        self.prefix = self.position // TILE + 1

    def parts(self, part_tiles: int) -> int:
        return up(self.prefix, part_tiles) if self.prefix > part_tiles else 1

    def tiles_of(self, first_row: int) -> int:
        last = min(first_row + ROWS, self.num_rows) - 1
        return (self.position + last // self.group) // TILE + 1


def part_tiles(chunks: list[Chunk], heads: int, ctas: int) -> int:
    """Chunks with more tiles in front of them are cut."""
    real = [c for c in chunks if c.num_rows]
    deepest = max((c.prefix for c in real), default=0)
    if deepest < 2 * MIN_PART - 1:
        return UNCUT
    means = [c.row_tiles * ((c.position + c.length) // (2 * TILE) + 1) for c in real]
    work, longest = heads * sum(means), max(c.tiles for c in real)
    if heads * sum(c.row_tiles for c in real) >= ctas and longest * ctas <= 2 * work:
        return UNCUT
    costs = []
    for most in range(1, 33):
        tiles = up(deepest, most)
        each = [c.parts(tiles) for c in real]
        counts = [heads * c.row_tiles * n for c, n in zip(real, each, strict=True)]
        largest = max(up(c.tiles, n) for c, n in zip(real, each, strict=True))
        in_turns = up(sum(counts), ctas) * (largest + PART_TILES)
        in_a_row = (work + sum(counts) * PART_TILES) // ctas + largest + PART_TILES
        num_parts = sum(count for count, n in zip(counts, each, strict=True) if n > 1)
        if tiles >= MIN_PART and num_parts <= MOST_PARTS:
            costs.append((min(in_turns, in_a_row) + (most - 1).bit_length(), tiles))
    cost, tiles = min(costs, key=lambda one: one[0])
    return tiles if cost * 8 <= costs[0][0] * 7 else UNCUT


def plan(mix: Mix, heads: tuple[int, int], ctas: int) -> Iterator[Part]:
    """All items, those that are cut in the order of their parts; `heads` of queries and of kv."""
    group = heads[0] // heads[1]
    chunks = [Chunk(queries, length, group) for queries, length in mix]
    most = part_tiles(chunks, heads[1], ctas)
    number = 0
    for s, chunk in enumerate(chunks):
        parts = chunk.parts(most)
        for head in range(heads[1]):
            for row in reversed(range(0, chunk.num_rows, ROWS)):
                tiles = chunk.tiles_of(row)
                for part in range(parts):
                    begin, end = tiles * part // parts, tiles * (part + 1) // parts
                    yield Part(s, head, row, begin, end, part, parts, number)
                number += parts if parts > 1 else 0
