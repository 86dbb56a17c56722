"""Pages of adapters: each tile has its own bytes, and little room is lost."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.lora.terms import turned
from slipstream.runner.adapter_pages import (
    Tile,
    at,
    bytes_of,
    filled,
    in_a_row,
    pack,
    page_bytes_of,
)

PAGE = 1 << 18
SIZES = st.integers(1, PAGE // 256).map(lambda n: 256 * n)


@given(st.lists(SIZES, max_size=60))
def test_no_two_tiles_share_bytes_and_pages_are_half_full_or_more(sizes: list[int]) -> None:
    spots, num_pages = pack(sizes, PAGE)
    taken: dict[int, list[tuple[int, int]]] = {}
    for (page, offset), size in zip(spots, sizes, strict=True):
        taken.setdefault(page, []).append((offset, offset + size))
    assert sorted(taken) == list(range(num_pages))
    for spans in taken.values():
        spans.sort()
        assert spans[0][0] == 0
        assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
        assert spans[-1][1] <= PAGE
    assert num_pages <= max(1, 2 * sum(sizes) / PAGE) or not sizes


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 40)), min_size=1, max_size=9))
def test_tiles_in_pages_and_in_a_row_are_what_they_were_and_zeros(
    shapes: list[tuple[int, int]],
) -> None:
    """Tiles of A, and of B as it is and turned."""
    tiles = [Tile(torch.randn(rows, 8 * n), (16, 8 * n)) for rows, n in shapes]
    for rank, n in shapes:
        b = torch.randn(8 * n, rank + 3)[:, :rank]
        tiles.append(Tile(b, (8 * n, 16)))
        tiles.append(Tile(b, (-(-8 * n // 16) * 16, 16), is_turned=True))
    sizes = [tile.num_bytes for tile in tiles]
    page_bytes = page_bytes_of(8 * 40, 4)
    spots, num_pages = pack(sizes, page_bytes)
    row, row_bytes = in_a_row(sizes)
    for own, size, count in ((spots, page_bytes, num_pages), (row, row_bytes, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "empty", lambda size, dtype: np.full(size, 255, dtype))
            pages = filled(tiles, own, count, size).view(count, size)
        for tile, spot in zip(tiles, own, strict=True):
            found = at(pages[spot.page], spot.offset, tile.shape, torch.float32)
            found = turned(found) if tile.is_turned else found  # twice is the tile itself
            rows, columns = tile.values.shape
            assert torch.equal(found[:rows, :columns], tile.values)
            assert not found[rows:].any()
            assert not found[:, columns:].any()
    assert row_bytes == sum(sizes)


def test_a_page_has_room_for_the_largest_tile() -> None:
    assert page_bytes_of(64, 2) == PAGE
    assert page_bytes_of(14336, 2) == bytes_of(16, 14336, 2) == 458752
