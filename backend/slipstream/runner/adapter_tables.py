"""Tables by which kernels find the adapters of a step's rows (`kernels/lora/terms.py`).

They lie where they lay before in every step of the same shape, so CUDA graphs can read them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.fuse.adapt import HEAD, AdaptedPlace
from slipstream.kernels.gemm.op import scratch_of
from slipstream.kernels.lora import terms as lora
from slipstream.kernels.lora.terms import TILE, Pair, Table
from slipstream.kernels.lora.terms import tiles_of as cut
from slipstream.layers.adapted import Term, Terms
from slipstream.models.adapters.config import MAX_RANK
from slipstream.runner.adapter_pages import (
    PageCopies,
    Spot,
    Tile,
    at,
    bytes_of,
    filled,
    in_a_row,
    pack,
    page_bytes_of,
)
from slipstream.runner.staging import Staging
from slipstream.runner.step_arrays import Array, Int32s, Int64s, StepShape

WIDEST = lora.PARTS * MAX_RANK  # of any adapter: graphs have room for it
_ROW_BYTES = 64  # of both tables, with what lies between arrays


class InPages(NamedTuple):
    """A term of some outputs of a place, in tiles."""

    place: str
    first: int  # output
    rank: int
    tiles: list[Pair]
    outputs: int
    is_turned: bool  # the tiles of B

    def whole(self) -> Term:
        """Return a copy of the term in one piece, for torch."""
        a = torch.cat([a for a, _ in self.tiles])[: self.rank]
        tiles = [lora.turned(b) if self.is_turned else b for _, b in self.tiles]
        return Term(self.first, a, torch.cat(tiles, 1)[: self.outputs, : self.rank])


class HostPages(NamedTuple):
    """An adapter in pages of host memory, which are copied to the device as they are."""

    memory: Tensor  # one page behind another
    num_pages: int
    page_bytes: int
    spots: list[Spot]  # of tiles
    shapes: list[tuple[int, int]]  # of tiles, filled up
    ranks: list[list[int]]  # of each place those of its parts; 0: no term


class Laid(NamedTuple):
    """Where the kernels find an adapter's terms."""

    words: Tensor  # see `describe`
    address: int  # of them
    width: int
    pages: list[Tensor]
    host: HostPages  # without its memory, where that is not the device's
    layout: "TileLayout"

    def parts(self) -> list[InPages]:
        """Return the terms where they lie."""
        host, layout, found = self.host, self.layout, list[InPages]()
        tiles = (
            at(self.pages[spot.page], spot.offset, shape, layout.dtype)
            for spot, shape in zip(host.spots, host.shapes, strict=True)
        )
        for place, of_parts in zip(layout.places, host.ranks, strict=True):
            first = 0
            for size, rank in zip(place.sizes, of_parts, strict=True):
                pairs = [(next(tiles), next(tiles)) for _ in range(-(-rank // TILE))]
                if pairs:
                    whole = InPages(place.name, first, rank, pairs, size, layout.is_turned)
                    found.append(whole)
                first += size
        return found

    def terms(self) -> Terms:
        """Return copies of the terms, for steps in which torch adds all."""
        found: dict[str, list[Term]] = {}
        for part in self.parts():
            found.setdefault(part.place, []).append(part.whole())
        return found


class Uploaded(NamedTuple):
    """A step's tables."""

    tables: Mapping[str, Table]  # of `tokens` and `kept`
    is_home: bool  # whether they lie where graphs read them


class TileLayout:
    """The tiles of adapters that kernels take.

    Args:
        places: of a model, in the order of their numbers.
        is_turned: whether tiles of B are; see `Tile`.
        dtype: of the terms.
    """

    def __init__(self, places: Sequence[AdaptedPlace], is_turned: bool, dtype: torch.dtype) -> None:
        self.places = [each for each in places if each.linear is not None and each.name != HEAD]
        self.is_turned, self.dtype = is_turned, dtype
        largest = max((max(each.inputs, *each.sizes) for each in self.places), default=1)
        largest = -(-largest // TILE) * TILE
        self.page_bytes = page_bytes_of(largest, dtype.itemsize)
        refusals = [lora.refusal(each.inputs, each.sizes) for each in self.places]
        self.refusal = next(filter(None, refusals), None)

    def num_pages(self, terms: Terms) -> int | None:
        """Count the pages that an adapter takes; None: the kernels do not take it."""
        described = self.described(terms)
        if described is None:
            return None
        return pack(self.sizes(self.shapes(described)), self.page_bytes)[1]

    def shapes(self, described: Sequence[Sequence[Pair | None]]) -> list[tuple[int, int]]:
        """Return the shapes of the tiles of all pairs, filled up, in the order of `tiles`."""
        found: list[tuple[int, int]] = []
        for a, b in (pair for parts in described for pair in parts if pair is not None):
            rows = -(-len(b) // TILE) * TILE if self.is_turned else len(b)
            found += [(TILE, a.shape[1]), (rows, TILE)] * -(-len(a) // TILE)
        return found

    def sizes(self, shapes: Sequence[tuple[int, int]]) -> list[int]:
        """Return the bytes of tiles of some shapes."""
        return [bytes_of(rows, columns, self.dtype.itemsize) for rows, columns in shapes]

    def tiles(self, described: Sequence[Sequence[Pair | None]]) -> list[Tile]:
        """Return the tiles of all pairs, of each 16 ranks A's and then B's."""
        pairs = (pair for parts in described for pair in parts if pair is not None)
        halves = [half for pair in pairs for tile in cut(pair) for half in tile]
        shapes = self.shapes(described)
        return [
            Tile(half, shape, self.is_turned and bool(number % 2))
            for number, (half, shape) in enumerate(zip(halves, shapes, strict=True))
        ]

    def described(self, terms: Terms) -> list[list[Pair | None]] | None:
        """Return the pairs of all parts of all places; None: the kernels do not take a term."""
        names = {place.name for place in self.places}
        plain = all(t.a is not None and t.gain is None for each in terms.values() for t in each)
        if self.refusal is not None or not plain or not names.issuperset(terms):
            return None
        described: list[list[Pair | None]] = []
        for place in self.places:
            parts = list[Pair | None]([None] * len(place.sizes))
            if not all(_put(term, place.sizes, parts) for term in terms.get(place.name, ())):
                return None
            described.append(parts)
        return described


class AdapterTables:
    """Lays adapters out for kernels, and makes the tables of steps.

    Args:
        layout: of the places that are here.
        page_bytes: of a page, which has room for any tile of it.
        device: of all tensors.
        max_tokens: of a step.
    """

    def __init__(
        self, layout: TileLayout, page_bytes: int, device: torch.device, max_tokens: int
    ) -> None:
        self._layout, self._page_bytes, self._device = layout, page_bytes, device
        self.staging = Staging(device, _ROW_BYTES * max_tokens + 4096)
        is_gpu = device.type == "cuda"
        self._scratch = scratch_of(WIDEST, device) if is_gpu else None
        self._copies = PageCopies(page_bytes, device) if is_gpu else None

    def lay_out(self, terms: Terms, most: int | None = None) -> HostPages | None:
        """Copy an adapter into pages of host memory, in any thread; None: the kernels do not take
        it, or its pages have more bytes than `most`.
        """
        described = self._layout.described(terms)
        if described is None:
            return None
        shapes = self._layout.shapes(described)
        sizes = self._layout.sizes(shapes)
        page_bytes = self._page_bytes
        if self._device.type == "cpu":  # whose memory has no pages to be handed out again
            (spots, page_bytes), num_pages = in_a_row(sizes), 1
        else:
            spots, num_pages = pack(sizes, page_bytes)
        if most is not None and num_pages * page_bytes > most:
            return None
        memory = filled(self._layout.tiles(described), spots, num_pages, page_bytes)
        ranks = [[0 if pair is None else len(pair[0]) for pair in parts] for parts in described]
        return HostPages(memory, num_pages, page_bytes, spots, shapes, ranks)

    def place(self, host: HostPages) -> Laid:
        """Copy an adapter to the device, on the current stream; on a CPU it is there."""
        pages = [host.memory]
        if self._copies is not None:
            pages = self._copies(host.memory, host.num_pages)
            host = host._replace(memory=host.memory[:0])
        bases = [page.data_ptr() for page in pages]
        addresses = iter([bases[spot.page] + spot.offset for spot in host.spots])

        def of(rank: int) -> list[tuple[int, int]] | None:
            if not rank:
                return None
            return [(next(addresses), next(addresses)) for _ in range(0, rank, TILE)]

        found = [[of(rank) for rank in ranks] for ranks in host.ranks]
        words, width = lora.describe(found, self._layout.is_turned)
        words = words.to(self._device)
        return Laid(words, words.data_ptr(), width, pages, host, self._layout)

    def upload(
        self, tokens: Int64s, kept: Int64s | None, active: Mapping[int, Laid], shape: StepShape
    ) -> Uploaded:
        """Copy the tables of a step to the device.

        Args:
            tokens: the adapter of each token, by number; 0: none.
            kept: of each token that the last block goes on with; None: of all.
            active: the step's adapters by number.
            shape: the step's.
        """
        addresses = {number: laid.address for number, laid in active.items()}
        width = max((laid.width for laid in active.values()), default=0)
        of = {"tokens": tokens} if kept is None else {"tokens": tokens, "kept": kept}
        made = [tabulate(each, addresses, most_groups(len(each), shape)) for each in of.values()]
        views, is_home = self._copied([array for arrays in made for array in arrays])
        tables = {
            name: Table(
                groups=views[3 * i],
                rows=views[3 * i + 1],
                marks=views[3 * i + 2],
                width=max(width, TILE),
                scratch=self._scratch,
            )
            for i, name in enumerate(of)
        }
        tables.setdefault("kept", tables["tokens"])
        return Uploaded(tables, is_home)

    def _copied(self, arrays: Sequence[Array]) -> tuple[list[Tensor], bool]:
        views = self.staging.upload(arrays)
        return views, self.staging.is_home(views[0])


def _put(term: Term, sizes: Sequence[int], parts: list[Pair | None]) -> bool:
    """Put a term where it belongs in the parts of its place.

    False: it does not begin and end with parts, or another is there.
    """
    assert term.a is not None, "checked"
    a, b = term.a, term.b
    first = 0
    for part, size in enumerate(sizes):
        begin, end = first - term.first, first - term.first + size
        first += size
        if end <= 0 or begin >= len(b):
            continue
        if begin < 0 or end > len(b) or parts[part] is not None:
            return False
        # Parts that PEFT had as one have the same A.
        parts[part] = a, b if len(b) == size else b[begin:end]
    return True


def most_groups(num_tokens: int, shape: StepShape) -> int:
    """Count the groups that tokens of a step make at most: each row may have its own adapter, and
    padding none.
    """
    return min(num_tokens, shape.num_rows + 1 + num_tokens // TILE)


def tabulate(
    numbers: Int64s, addresses: Mapping[int, int], num_groups: int
) -> tuple[Int64s, Int32s, Int32s]:
    """Return the groups, rows and marks of a `Table`.

    Args:
        numbers: the adapter of each row; 0: none.
        addresses: of the terms of each adapter.
        num_groups: to which the groups are filled up by empty ones.
    """
    own = np.where(numbers > 0, numbers, np.iinfo(np.int64).max)  # rows without one come last
    rows = own.argsort(kind="stable").astype(np.int32)
    groups = np.zeros((num_groups, 2), np.int64)
    at = begin = 0
    which, counts = np.unique(own, return_counts=True)
    for number, count in zip(which.tolist(), counts.tolist(), strict=True):
        firsts = np.arange(0, count, TILE)
        groups[at : at + len(firsts), 0] = addresses.get(number, 0)
        sizes = np.minimum(TILE, count - firsts)
        groups[at : at + len(firsts), 1] = (begin + firsts) | sizes << 32
        at += len(firsts)
        begin += count
    return groups, rows, (numbers > 0).astype(np.int32)
