"""Tables by which kernels find the adapters of a step's rows (`kernels/lora/terms.py`).

They lie where they lay before in every step of the same shape, so CUDA graphs can read them.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from slipstream.layers.adapted_experts import ByExpert
from slipstream.models.adapters.config import MAX_RANK
from slipstream.models.adapters.workers import turn
from slipstream.runner.adapter_pages import (
    PageCopies,
    Spot,
    Tile,
    filled,
    in_a_row,
    pack,
    page_bytes_of,
)
from slipstream.runner.staging import Staging
from slipstream.runner.step_arrays import Array, Int32s, Int64s
from slipstream.runner.step_shape import StepShape

WIDEST = lora.PARTS * MAX_RANK  # of any adapter: graphs have room for it
_ROW_BYTES = 80  # of both tables, with what lies between arrays


class HostPages(NamedTuple):
    """An adapter in pages of host memory, which are copied to the device as they are."""

    memory: Tensor  # one page behind another
    num_pages: int
    page_bytes: int
    spots: list[Spot]  # of tiles
    shapes: list[tuple[int, int]]  # of tiles, filled up
    ranks: list[list[int]]  # of each place those of its parts; 0: no term
    num_dense: int  # of the places, in front; the others are of experts


class Laid(NamedTuple):
    """Where the kernels find an adapter's terms."""

    words: Tensor  # see `describe`
    address: int  # of them
    width: int
    expert_address: int  # of those of experts; 0: there are none
    pages: list[Tensor]
    host: HostPages  # without its memory, where that is not the device's
    layout: "TileLayout"


class Uploaded(NamedTuple):
    """A step's tables."""

    tables: Mapping[str, Table]  # of `tokens` and `kept`
    is_home: bool  # whether they lie where graphs read them


class ExpertPlace(NamedTuple):
    """The matrices of one expert that have the same inputs."""

    name: str  # of the place of all experts
    expert: int
    first: int  # output of that place
    sizes: tuple[int, ...]  # outputs of each


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
        mixtures = [each for each in places if each.num_experts]
        self.experts = [own for each in mixtures for own in _of_experts(each)]
        self._mixtures = {each.name for each in mixtures}
        taken = [*self.places, *mixtures]
        largest = max((max(each.inputs, *each.sizes) for each in taken), default=1)
        largest = -(-largest // TILE) * TILE
        self.page_bytes = page_bytes_of(largest, dtype.itemsize)
        refusals = [lora.refusal(each.inputs, each.sizes) for each in self.places]
        self.refusal = next(filter(None, refusals), None)
        of_experts = [lora.refusal(each.inputs, each.sizes[:2]) for each in mixtures]
        self._expert_refusal = next(filter(None, of_experts), None)

    def num_pages(self, terms: Terms) -> int | None:
        """Count the pages that an adapter takes; None: the kernels do not take it."""
        described = self.described(terms)
        if described is None:
            return None
        return pack([tile.num_bytes for tile in self.tiles(described)[0]], self.page_bytes)[1]

    def tiles(self, described: Sequence[Sequence[Pair | None]]) -> tuple[list[Tile], list[int]]:
        """Return the tiles of all pairs, and of each 16 ranks the numbers of A's and B's tile.

        Gate and up of an expert share A's if they have the same.
        """
        found: list[Tile] = []
        numbers: list[int] = []
        for place, parts in enumerate(described):
            turn()
            known: dict[int, int] = {}  # of A, by address
            for pair in (pair for pair in parts if pair is not None):
                for a, b in cut(pair):
                    rows = b.shape[0]  # `len` takes longer
                    rows = -(-rows // TILE) * TILE if self.is_turned else rows
                    number = known.get(a.data_ptr(), len(found))
                    if number == len(found):
                        found.append(Tile(a, (TILE, a.shape[1])))
                    if place >= len(self.places):
                        known[a.data_ptr()] = number
                    numbers += [number, len(found)]
                    found.append(Tile(b, (rows, TILE), self.is_turned))
        return found, numbers

    def described(self, terms: Terms) -> list[list[Pair | None]] | None:
        """Return the pairs of all parts of all places, and behind them of all experts if there are
        any; None: the kernels do not take a term.
        """
        names = {place.name for place in self.places} | self._mixtures
        plain = all(t.a is not None and t.gain is None for each in terms.values() for t in each)
        if self.refusal is not None or not plain or not names.issuperset(terms):
            return None
        described: list[list[Pair | None]] = []
        for place in self.places:
            turn()
            parts = list[Pair | None]([None] * len(place.sizes))
            if not all(_put(term, place.sizes, parts) for term in terms.get(place.name, ())):
                return None
            described.append(parts)
        if self._mixtures.isdisjoint(terms):
            return described
        of_experts = None if self._expert_refusal else self._of_experts(terms)
        return None if of_experts is None else described + of_experts

    def _of_experts(self, terms: Terms) -> list[list[Pair | None]] | None:
        """Return the pairs of all experts."""
        found: dict[str, ByExpert] = {}
        described: list[list[Pair | None]] = []
        for place in self.experts:
            if place.name not in found:
                found[place.name] = ByExpert(terms.get(place.name, ()), sum(place.sizes))
            parts = list[Pair | None]([None] * len(place.sizes))
            own = found[place.name].of(place.expert)
            if not all(_put(term, place.sizes, parts) for term in own):
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
        tiles, numbers = self._layout.tiles(described)
        turn()
        sizes = [tile.num_bytes for tile in tiles]
        page_bytes = self._page_bytes
        if self._device.type == "cpu":  # whose memory has no pages to be handed out again
            (spots, page_bytes), num_pages = in_a_row(sizes), 1
        else:
            turn()
            spots, num_pages = pack(sizes, page_bytes)
        turn()
        if most is not None and num_pages * page_bytes > most:
            return None
        memory = filled(tiles, spots, num_pages, page_bytes)
        ranks = [[0 if pair is None else pair[0].shape[0] for pair in parts] for parts in described]
        shapes, where = [tiles[i].shape for i in numbers], [spots[i] for i in numbers]
        given = memory, num_pages, page_bytes, where, shapes, ranks
        return HostPages(*given, len(self._layout.places))

    def place(self, host: HostPages) -> Laid:
        """Copy an adapter to the device, on the current stream; on a CPU it is there."""
        pages = [host.memory]
        if self._copies is not None:
            pages = self._copies(host.memory, host.num_pages)
            host = host._replace(memory=host.memory[:0])
        bases = [page.data_ptr() for page in pages]
        flat = [bases[spot.page] + spot.offset for spot in host.spots]
        addresses = np.array(flat, np.int64).reshape(-1, 2)
        counts = [[-(-rank // TILE) for rank in ranks] for ranks in host.ranks]
        dense, of_experts = counts[: host.num_dense], counts[host.num_dense :]
        end = sum(map(sum, dense))
        is_turned = self._layout.is_turned
        words, width = lora.words_of(dense, addresses[:end], is_turned)
        begin = len(words)
        if of_experts:
            numbers = [place.expert for place in self._layout.experts]
            more, wide = lora.words_of(of_experts, addresses[end:], is_turned, numbers)
            words, width = torch.cat([words, more]), max(width, wide)
        words = words.to(self._device)
        base = words.data_ptr()
        expert_address = base + 8 * begin if of_experts else 0
        return Laid(words, base, width, expert_address, pages, host, self._layout)

    def upload(
        self,
        tokens: Int64s,
        kept: Int64s | None,
        active: Mapping[int, Laid],
        shape: StepShape,
        has_experts: bool,
    ) -> Uploaded:
        """Copy the tables of a step to the device.

        Args:
            tokens: the adapter of each token, by number; 0: none.
            kept: of each token that the last block goes on with; None: of all.
            active: the step's adapters by number.
            shape: the step's.
            has_experts: whether kernels look for terms of experts.
        """
        addresses = {number: laid.address for number, laid in active.items()}
        of_experts = {number: laid.expert_address for number, laid in active.items()}
        width = max((laid.width for laid in active.values()), default=0)
        of = {"tokens": tokens} if kept is None else {"tokens": tokens, "kept": kept}
        made: list[tuple[Array, ...]] = []
        for numbers in of.values():
            found = tabulate(numbers, addresses, most_groups(len(numbers), shape))
            # In every step, so that all lies where it lay.
            more = [addresses_of(numbers, of_experts)] if self._layout.experts else []
            made.append((*found, *more))
        views, is_home = self._copied([array for arrays in made for array in arrays])
        size = len(made[0])
        tables: dict[str, Table] = {}
        for i, name in enumerate(of):
            groups, rows, marks, *more_views = views[i * size : (i + 1) * size]
            own = more_views[0] if has_experts and more_views else None
            given = groups, rows, marks, max(width, TILE), self._scratch, own
            tables[name] = Table(*given)
        tables.setdefault("kept", tables["tokens"])
        return Uploaded(tables, is_home)

    def _copied(self, arrays: Sequence[Array]) -> tuple[list[Tensor], bool]:
        views = self.staging.upload(arrays)
        return views, self.staging.is_home(views[0])


def _of_experts(place: AdaptedPlace) -> Iterator[ExpertPlace]:
    """Yield a place of all experts expert by expert."""
    count = len(place.sizes) // place.num_experts
    sizes = place.sizes[:count]
    for expert in range(place.num_experts):
        yield ExpertPlace(place.name, expert, expert * sum(sizes), sizes)


def addresses_of(numbers: Int64s, addresses: Mapping[int, int]) -> Int64s:
    """Return the address for each row, by the number of its adapter; 0: there is none."""
    which, where = np.unique(numbers, return_inverse=True)
    return np.array([addresses.get(n, 0) for n in which.tolist()], np.int64)[where]


def _put(term: Term, sizes: Sequence[int], parts: list[Pair | None]) -> bool:
    """Put a term where it belongs in the parts of its place.

    False: it does not begin and end with parts, or another is there.
    """
    assert term.a is not None, "checked"
    a, b, first = term.a, term.b, 0
    rows = b.shape[0]
    for part, size in enumerate(sizes):
        begin, end = first - term.first, first - term.first + size
        first += size
        if end <= 0 or begin >= rows:
            continue
        if begin < 0 or end > rows or parts[part] is not None:
            return False
        # Parts that PEFT had as one have the same A.
        parts[part] = a, b if rows == size else b[begin:end]
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
    which, counts = np.unique(own, return_counts=True)
    begins = np.cumsum(counts) - counts
    of_each = -(-counts // TILE)  # groups
    adapter = np.arange(len(which)).repeat(of_each)  # of each group
    firsts = TILE * (np.arange(len(adapter)) - (np.cumsum(of_each) - of_each)[adapter])
    sizes = np.minimum(TILE, counts[adapter] - firsts)
    groups = np.zeros((num_groups, 2), np.int64)
    there = groups[: len(adapter)]
    there[:, 0] = np.array([addresses.get(n, 0) for n in which.tolist()], np.int64)[adapter]
    there[:, 1] = (begins[adapter] + firsts) | sizes << 32
    return groups, rows, (numbers > 0).astype(np.int32)
