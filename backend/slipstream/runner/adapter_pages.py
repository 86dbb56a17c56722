"""Pages of device memory: tiles of an adapter's matrices lie in them, so that any pages will do.

A page has room for the largest tile of any place. Tiles go where least is left over, the largest
first; what no tile fits into is lost, and counted as the adapter's.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.lora.terms import TILE, turned
from slipstream.models.adapters.memory import MEMORY
from slipstream.models.adapters.workers import in_threads, turn

LEAST_PAGE = 1 << 18  # bytes
_PIECE = 8 << 20  # bytes that are copied to the device together
_FILLED = 4 << 20  # bytes of pages that a thread fills together
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


def filled(tiles: Sequence[Tile], spots: Sequence[Spot], num_pages: int, page_bytes: int) -> Tensor:
    """Return pages in host memory, one behind another, with tiles where they belong.

    What no tile takes is undefined. Several threads copy, each many tiles by one operation: the
    interpreter's lock, which steps need, is given away and awaited once for all of them.
    """
    memory = MEMORY.take(max(num_pages * page_bytes, _ALIGNMENT))
    views = {dtype: memory.view(dtype) for dtype in {tile.values.dtype for tile in tiles}}
    pieces: list[tuple[list[Tensor], list[Tensor]]] = []
    left = 0
    for tile, (page, offset) in zip(tiles, spots, strict=True):
        turn()
        view, (rows, columns) = views[tile.values.dtype], tile.shape
        first = (page * page_bytes + offset) // view.element_size()
        if left <= 0:
            pieces.append(([], []))
            left = _FILLED
        left -= rows * columns * view.element_size()
        for target, values in _copies(tile, view.as_strided((rows, columns), (columns, 1), first)):
            pieces[-1][0].append(target)
            pieces[-1][1].append(values)
    for _ in in_threads(lambda piece: torch._foreach_copy_(*piece), pieces):
        pass
    return memory


class PageCopies:
    """Copies pages to a GPU on the current stream, some at a time by turns through two pieces of
    pinned memory, which are there from the start: to pin as much as an adapter has takes longer
    than to copy it.

    One thread may copy at a time.
    """

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        self._page_bytes, self._device = page_bytes, device
        count = max(1, _PIECE // page_bytes)
        self._pinned = [
            torch.empty((count, page_bytes), dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def __call__(self, memory: Tensor, num_pages: int) -> list[Tensor]:
        """Start to copy pages that lie one behind another; return those on the device."""
        size, device = self._page_bytes, self._device
        pages = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num_pages)]
        source = memory[: num_pages * size].view(num_pages, size)
        count = len(self._pinned[0])
        for number, first in enumerate(range(0, num_pages, count)):
            own, copied = pages[first : first + count], self._copied[number % 2]
            copied.synchronize()
            pinned = self._pinned[number % 2][: len(own)]
            pinned.copy_(source[first : first + count])
            torch._foreach_copy_(own, list(pinned.unbind()), non_blocking=True)
            copied.record()
        return pages


def in_a_row(sizes: Sequence[int]) -> tuple[list[Spot], int]:
    """Return the spots of tiles one behind another, of one page, and its bytes."""
    ends = list(accumulate(sizes, initial=0))
    return [Spot(0, end) for end in ends[:-1]], ends[-1]


def _copies(tile: Tile, to: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what is to be copied where, of a tile and of the zeros that fill it up."""
    values = tile.values
    if values.shape != tile.shape:
        to.zero_()
        values = turned(values) if tile.is_turned else values
        yield to[: len(values), : values.shape[1]], values
    elif tile.is_turned:
        yield to.view(-1, TILE, TILE), values.reshape(-1, TILE, TILE).transpose(1, 2)
    else:
        yield to, values


def at(page: Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a part of a page as a matrix."""
    size = shape[0] * shape[1] * dtype.itemsize
    return page[offset : offset + size].view(dtype).view(shape)
