"""Tables by which kernels find the adapters of a step's rows (`kernels/lora/terms.py`).

They lie where they lay before in every step of the same shape, so CUDA graphs can read them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.fuse.adapt import EMBEDDING, HEAD, AdaptedPlace
from slipstream.kernels.lora import terms as lora
from slipstream.kernels.lora.terms import TILE, Pair, Table
from slipstream.layers.adapted import Term, Terms
from slipstream.models.adapters.config import MAX_RANK
from slipstream.runner.staging import Staging
from slipstream.runner.step_arrays import Array, Int32s, Int64s, StepShape

WIDEST = lora.PARTS * MAX_RANK  # of any adapter: graphs have room for it
_ROW_BYTES = 64  # of both tables, with what lies between arrays


class Laid(NamedTuple):
    """Where the kernels find an adapter's terms."""

    words: Tensor  # see `describe`
    address: int  # of them
    width: int


class Uploaded(NamedTuple):
    """A step's tables."""

    tables: Mapping[str, Table]  # of `tokens` and `kept`
    is_home: bool  # whether they lie where graphs read them


class AdapterTables:
    """Lays adapters out for kernels, and makes the tables of steps.

    Args:
        places: of the model, in the order of their numbers.
        device: of all tensors.
        max_tokens: of a step.
    """

    def __init__(
        self, places: Sequence[AdaptedPlace], device: torch.device, max_tokens: int
    ) -> None:
        self._places = [each for each in places if each.name not in (HEAD, EMBEDDING)]
        self._device = device
        self.staging = Staging(device, _ROW_BYTES * max_tokens + 4096)
        refusals = [lora.refusal(each.inputs, each.sizes) for each in self._places]
        self.refusal = next(filter(None, refusals), None)

    def lay_out(self, terms: Terms) -> tuple[Terms, Laid | None]:
        """Return an adapter's terms as the kernels need them; None: they do not take it."""
        names = {place.name for place in self._places}
        plain = all(t.a is not None and t.gain is None for each in terms.values() for t in each)
        if self.refusal is not None or not plain or not names.issuperset(terms):
            return terms, None
        own: dict[str, tuple[Term, ...]] = {}
        described: list[list[Pair | None]] = []
        for place in self._places:
            parts = list[Pair | None]([None] * len(place.sizes))
            found = [_put(term, place.sizes, parts) for term in terms.get(place.name, ())]
            if None in found:
                return terms, None
            described.append(parts)
            if found:
                own[place.name] = tuple(term for term in found if term is not None)
        words, width = lora.describe(described)
        words = words.to(self._device)
        return own, Laid(words, words.data_ptr(), width)

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
            name: Table(views[3 * i], views[3 * i + 1], views[3 * i + 2], max(width, TILE))
            for i, name in enumerate(of)
        }
        tables.setdefault("kept", tables["tokens"])
        return Uploaded(tables, is_home)

    def _copied(self, arrays: Sequence[Array]) -> tuple[list[Tensor], bool]:
        views = self.staging.upload(arrays)
        if self._device.type == "cpu":
            return views, False
        return views, views[0].data_ptr() == self.staging.home.data_ptr()


def _put(term: Term, sizes: Sequence[int], parts: list[Pair | None]) -> Term | None:
    """Put a term where it belongs in the parts of its place; return it, in the same memory.

    None: it does not begin and end with parts, or another is there.
    """
    assert term.a is not None, "checked"
    a, b = lora.padded((term.a, term.b))
    first = 0
    for part, size in enumerate(sizes):
        begin, end = first - term.first, first - term.first + size
        first += size
        if end <= 0 or begin >= len(b):
            continue
        if begin < 0 or end > len(b) or parts[part] is not None:
            return None
        parts[part] = a, b[begin:end]  # A is shared by parts that PEFT had as one
    rank = len(term.a)
    return term._replace(a=a[:rank], b=b[:, :rank])


def most_groups(num_tokens: int, shape: StepShape) -> int:
    """Count the groups that tokens of a step make at most: each row may have its own adapter."""
    return min(num_tokens, shape.num_rows + num_tokens // TILE)


def tabulate(
    numbers: Int64s, addresses: Mapping[int, int], num_groups: int
) -> tuple[Int64s, Int32s, Int32s]:
    """Return the groups, rows and marks of a `Table`.

    Args:
        numbers: the adapter of each row; 0: none.
        addresses: of the terms of each adapter.
        num_groups: to which the groups are filled up by empty ones.
    """
    marks = numbers > 0
    found = marks.nonzero()[0]
    own = numbers[found]
    order = own.argsort(kind="stable")
    rows = np.zeros(len(numbers), np.int32)
    rows[: len(found)] = found[order]
    groups = np.zeros((num_groups, 2), np.int64)
    at = begin = 0
    which, counts = np.unique(own, return_counts=True)
    for number, count in zip(which.tolist(), counts.tolist(), strict=True):
        for first in range(0, count, TILE):
            groups[at] = addresses[number], (begin + first) | min(TILE, count - first) << 32
            at += 1
        begin += count
    return groups, rows, marks.astype(np.int32)
