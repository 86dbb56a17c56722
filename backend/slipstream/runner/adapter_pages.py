"""Pages of device memory: tiles of an adapter's matrices lie in them, so that any pages will do.

A page has room for the largest tile of any place. Tiles go where least is left over, the largest
first; what no tile fits into is lost, and counted as the adapter's.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.lora.terms import TILE, turned

LEAST_PAGE = 1 << 18  # bytes
_ALIGNMENT = 256


class Tile(NamedTuple):
    """A tile of A or B, in host memory."""

    values: Tensor
    shape: tuple[int, int]  # that it is filled up to, by zeros
    is_turned: bool = False  # on the device, a tile of B; see `turned`

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on the device."""
        return bytes_of(*self.shape, self.values.element_size())


class Spot(NamedTuple):
    """Where a tile is: its page, by its number in the adapter, and bytes before it."""

    page: int
    offset: int


def bytes_of(rows: int, columns: int, itemsize: int) -> int:
    """Count the bytes of a tile."""
    return -(-rows * columns * itemsize // _ALIGNMENT) * _ALIGNMENT


def page_bytes_of(largest: int, itemsize: int) -> int:
    """Return the size of a page for tiles of matrices with at most so many inputs or outputs."""
    return max(LEAST_PAGE, bytes_of(TILE, largest, itemsize))


def pack(sizes: Sequence[int], page_bytes: int) -> tuple[list[Spot], int]:
    """Return the spot of each tile of so many bytes, and how many pages they take."""
    spots = [Spot(0, 0)] * len(sizes)
    left: list[tuple[int, int]] = []  # bytes at the end of a page, and its number; rising
    num_pages = 0
    for tile in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[tile]
        assert size <= page_bytes, "a page has room for any tile"
        found = bisect_left(left, (size, 0))
        if found < len(left):
            room, page = left.pop(found)
        else:
            room, page = page_bytes, num_pages
            num_pages += 1
        spots[tile] = Spot(page, page_bytes - room)
        if room > size:
            insort(left, (room - size, page))
    return spots, num_pages


def copy_pages(
    tiles: Sequence[Tile], spots: Sequence[Spot], page_bytes: int, device: torch.device
) -> list[Tensor]:
    """Copy tiles into new pages of a device, on the current stream; return the pages.

    On a GPU the bytes of each come from pinned memory, which torch uses again after the copy.
    """
    of_page: dict[int, list[tuple[Tile, int]]] = defaultdict(list)
    for tile, (page, offset) in zip(tiles, spots, strict=True):
        of_page[page].append((tile, offset))
    pages: list[Tensor] = []
    for number in range(len(of_page)):
        made = torch.zeros(page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for tile, offset in of_page[number]:
            _put(tile, at(made, offset, tile.shape, tile.values.dtype))
        pages.append(made.to(device, non_blocking=True))
    return pages


def in_a_row(sizes: Sequence[int]) -> tuple[list[Spot], int]:
    """Return the spots of tiles one behind another, of one page, and its bytes."""
    ends = list(accumulate(sizes, initial=0))
    return [Spot(0, end) for end in ends[:-1]], ends[-1]


def _put(tile: Tile, to: Tensor) -> None:
    """Copy a tile to where it is filled up, which is zeros."""
    values = tile.values
    if tile.is_turned and values.shape == tile.shape:
        to.view(-1, TILE, TILE).copy_(values.reshape(-1, TILE, TILE).transpose(1, 2))
        return
    if tile.is_turned:
        values = turned(values)
    rows, columns = values.shape
    to[:rows, :columns] = values


def at(page: Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a part of a page as a matrix."""
    size = shape[0] * shape[1] * dtype.itemsize
    return page[offset : offset + size].view(dtype).view(shape)
