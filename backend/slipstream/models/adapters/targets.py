"""The matrices of a decoder that adapters can change, by the checkpoint's names of modules."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.fuse.adapt import EMBEDDING, HEAD, AdaptedPlace
from slipstream.layers.adapted import Term
from slipstream.layers.embedding import Table
from slipstream.layers.linear import Linear
from slipstream.layers.magnitudes import Kind, squares
from slipstream.models.adapters.config import MAX_RANK
from slipstream.models.axes import TensorNames
from slipstream.models.cuts import Cut
from slipstream.models.stages import Bounds

_OF_INPUTS = ("o_proj",)  # layers of whose matrices inputs are arranged, not outputs
_WRAPPED = "language_model."  # in the names of adapters that were trained in a larger model
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs of a place, and how they are made of a stored module's tensors.

    Sizes are the whole model's, if ranks share it; `cuts` says what each rank has of the part.
    """

    place: str
    first: int  # output of the place
    outputs: int
    inputs: int
    cuts: tuple["RankCut", ...]  # by rank; one that has all, for one rank
    name: str  # the decoder's
    names: TensorNames
    linear: Linear | None  # None: the embedding, or matrices of heads
    table: Table | None  # of head or embedding
    kind: Kind

    def squares(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of squares of each row with `b a` added; see `layers/magnitudes.py`."""
        assert self.linear is not None, "magnitudes are of linear layers"
        return squares(self.linear, self.first, a, b, self.kind)

    @property
    def is_of_inputs(self) -> bool:
        """Whether ranks have parts of its inputs."""
        return self.cuts[0].inputs is not None

    @property
    def stored(self) -> str:
        """Name of the checkpoint's matrix."""
        return self.names.stored(f"{self.name}.weight")

    def own(self, matrix: Tensor) -> Tensor:
        """Return what rank 0 has of a matrix `[outputs, inputs]` of head or embedding."""
        return self.cuts[0].of_outputs(matrix)

    def of_ranks(self, term: Term) -> list[Term]:
        """Return what each rank has of a term of the part."""
        if len(self.cuts) == 1:
            return [term]
        return [self._of_rank(term, cut) for cut in self.cuts]

    def _of_rank(self, term: Term, cut: "RankCut") -> Term:
        a, b, gain = term.a, term.b, term.gain
        if self.place == EMBEDDING and a is not None:  # rows of an embedding
            return Term(cut.first, cut.of_outputs(a), b)
        a = None if a is None else cut.of_inputs(a)
        gain = None if gain is None else cut.of_outputs(gain)
        return Term(cut.first, a, cut.of_outputs(b), gain)

    def of_a(self, a: Tensor) -> Tensor:
        """Return A of the part, `[r, inputs]`, of the module's."""
        return self._changed(a) if self.name.endswith(_OF_INPUTS) else a

    def of_b(self, b: Tensor) -> Tensor:
        """Return B of the part, `[outputs, r]`, of the module's."""
        return b if self.name.endswith(_OF_INPUTS) else self._changed(b)

    @property
    def is_changed(self) -> bool:
        """Whether the decoder's matrix is another than the checkpoint's of that name."""
        return self.names.change(f"{self.name}.weight") is not None

    def _changed(self, x: Tensor) -> Tensor:
        """Change one side of a matrix as the decoder changes the whole."""
        change = self.names.change(f"{self.name}.weight")
        if change is None:
            return x
        # A change of `[inputs, outputs]` turns it first: an adapter's tensors are never so.
        is_turned = self.name.endswith(self.names.transposed) if self.names.transposed else False
        return change(x.t() if is_turned else x)


@dataclass(frozen=True, slots=True)
class RankCut:
    """What a rank has of a part's outputs, from `first` on of its place, and of its inputs."""

    first: int
    outputs: Cut | None = None
    inputs: Cut | None = None

    def of_outputs(self, x: Tensor) -> Tensor:
        """Return the rank's rows of `[outputs, ...]`."""
        return x if self.outputs is None else _taken(x, self.outputs)

    def of_inputs(self, x: Tensor) -> Tensor:
        """Return the rank's columns of `[r, inputs]`."""
        return x if self.inputs is None else _taken(x, self.inputs)

    def of_each(self) -> "RankCut":
        """Return the same cut of a part of each of several experts, `[e, ...]`."""

        def behind(cut: Cut | None) -> Cut | None:
            return None if cut is None else replace(cut, dim=cut.dim + 1)

        return RankCut(0, behind(self.outputs), behind(self.inputs))


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer.

    gate, up, down: parts of the first of them.
    count: of experts.
    takes_turns: whether rows of gates and ups take turns where they lie in one tensor, which is
    `[e, inputs, outputs]` then.
    """

    gate: Part
    up: Part
    down: Part
    count: int
    takes_turns: bool


def _taken(x: Tensor, cut: Cut) -> Tensor:
    """Return the part of a tensor, with the zeros behind it."""
    shape = [*x.shape]
    shape[cut.dim] = cut.count
    out = x.new_empty(shape)
    cut.fill(out, cut.part_of(x))
    return out


def _module(names: TensorNames, name: str) -> str:
    """Return the checkpoint's name of a matrix, by the decoder's."""
    return names.stored(f"{name}.weight").removesuffix(".weight")


def _whole(cut: Cut | None, outputs: int, inputs: int) -> tuple[int, int]:
    if cut is None:
        return outputs, inputs
    rows, columns = cut.whole((outputs, inputs))
    return rows, columns


class _Found(NamedTuple):
    """Parts."""

    parts: dict[str, list[Part]]  # by the checkpoint's names
    by_name: dict[str, Part]  # by the decoder's


class Targets:
    """All parts, by the names of modules.

    Ranks are counted stage by stage, as those of an engine are.
    """

    def __init__(
        self,
        places: Sequence[AdaptedPlace],
        names: TensorNames,
        dtype: torch.dtype,
        device: torch.device,
        bounds: Bounds = (),
    ) -> None:
        """Take the places of a decoder, the family's names of tensors, and those of rows.

        The decoder is that of the rank of the names' cuts, if they have any. `bounds` are the
        layers of the stages of a pipeline; none: one has all. `device` meta: the decoder has sizes
        and no weights, so what depends on weights is not checked.
        """
        self.has_weights = device.type != "meta"
        self._size = 1 if names.cuts is None else names.cuts.size  # of a stage
        self._bounds = bounds
        self.num_ranks = self._size * max(1, len(bounds))
        self._prefix = names.prefix
        self.key_refusal = next((each.key_refusal for each in places if each.key_refusal), "")
        self._given = places, names, dtype, device

    @functools.cached_property
    def _found(self) -> _Found:
        """All parts but those of routed experts."""
        return self._made([place for place in self._given[0] if not place.num_experts])

    @functools.cached_property
    def _of_experts(self) -> _Found:
        """Parts of routed experts: many, and made when one of them is looked up by itself."""
        return self._made([place for place in self._given[0] if place.num_experts])

    def _made(self, places: Sequence[AdaptedPlace]) -> _Found:
        _, names, dtype, device = self._given
        parts: dict[str, list[Part]] = {}
        by_name: dict[str, Part] = {}
        for place in places:
            first = begin = 0  # outputs of the whole place, and of the rank's
            for name, count in zip(place.parts, place.sizes, strict=True):
                cuts = self._cuts(name, names, begin, count, place.inputs)
                cut = cuts[0].outputs or cuts[0].inputs
                outputs, inputs = _whole(cut, count, place.inputs)
                own = (place.linear, place.table, Kind(dtype, device))
                part = Part(place.name, first, outputs, inputs, cuts, name, names, *own)
                begin += count
                parts.setdefault(_module(names, name), []).append(part)
                by_name[name] = part
                first += outputs
        return _Found(parts, by_name)

    @functools.cached_property
    def _mixtures(self) -> dict[str, Mixture]:
        """All mixtures by the names of their experts, transformers' and the checkpoint's."""
        places, names, *_ = self._given
        firsts = []  # of each place of experts, what it has of the first
        for place in (each for each in places if each.num_experts):
            count = len(place.parts) // place.num_experts
            firsts.append(place._replace(parts=place.parts[:count], sizes=place.sizes[:count]))
        by_name, found = self._made(firsts).by_name, dict[str, Mixture]()
        for place in firsts:
            if len(place.parts) > 1:
                continue
            expert = place.parts[0].rpartition(".")[0]
            gate, up, down = (by_name[f"{expert}.{x}_proj"] for x in ("gate", "up", "down"))
            mixture = Mixture(gate, up, down, place.num_experts, place.takes_turns)
            stored = _module(names, place.parts[0]).rpartition(".")[0]
            found |= {name.removesuffix(".0"): mixture for name in (expert, stored)}
        return found

    def mixture(self, module: str) -> Mixture | None:
        """Return the experts that a module has, which need not be by its name in the checkpoint."""
        names = (module, module.replace(_WRAPPED, "", 1), f"{self._prefix}{module}")
        return next((self._mixtures[name] for name in names if name in self._mixtures), None)

    @staticmethod
    def _cuts(
        name: str, names: TensorNames, first: int, outputs: int, inputs: int
    ) -> tuple[RankCut, ...]:
        """Return what ranks have of a part; sizes are those of each."""
        if names.cuts is None:
            return (RankCut(first),)
        found = []
        for rank in range(names.cuts.size):
            cut = replace(names.cuts, rank=rank).of(f"{name}.weight", (outputs, inputs))
            sides = (None, cut) if cut is not None and cut.dim else (cut, None)
            found.append(RankCut(first, *sides))
        return tuple(found)

    def have(self, part: Part, matrix: Tensor) -> bool:
        """Return whether a whole matrix is the model's own, which nothing has to replace: PEFT
        writes such beside a vocabulary that grew. Ranks do not look.
        """
        if part.table is None or not self.has_weights or self.num_ranks > 1:
            return False
        device = part.kind.device
        return all(
            torch.equal(matrix[here].to(device), rows.to(matrix.dtype))
            for here, rows in part.table.parts(device)
        )

    @functools.cached_property
    def most_elements(self) -> int:
        """Numbers of the largest tensor that an adapter can have of a module."""
        found = 0
        for parts in self._found.parts.values():
            outputs, inputs = sum(part.outputs for part in parts), parts[0].inputs
            is_whole = parts[0].table is not None
            size = outputs * inputs if is_whole else 0
            found = max(found, size, MAX_RANK * max(outputs, inputs))
        for mixture in self._mixtures.values():
            outputs = mixture.gate.outputs + mixture.up.outputs
            found = max(found, MAX_RANK * max(outputs, mixture.gate.inputs))
        return found

    def ranks_of(self, place: str) -> range:
        """Return the ranks that have a part of a place: those of its stage."""
        found = _LAYER.match(place)
        layer = 0 if found is None else int(found[1])  # the first stage has the ends
        stage = next((i for i, (_, end) in enumerate(self._bounds) if layer < end), 0)
        return range(stage * self._size, (stage + 1) * self._size)

    @property
    def embedding_size(self) -> int:
        """Width of the rows of the embedding, which need not be that of the states."""
        return self._found.by_name[EMBEDDING].inputs

    def all(self) -> Iterator[Part]:
        """Yield all parts."""
        yield from self._found.by_name.values()
        yield from self._of_experts.by_name.values()

    def of_decoder(self, layer: int, name: str) -> Part | None:
        """Return the part that is a layer's matrix by the decoder's name; None: there is none."""
        return self._found.by_name.get(f"model.layers.{layer}.{name}")

    @property
    def kinds(self) -> str:
        """The last parts of their names."""
        names = [*self._found.parts, *self._of_experts.parts]
        return ", ".join(sorted({name.rpartition(".")[2] for name in names}))

    @property
    def num_layers(self) -> int:
        """How many layers have any."""
        found = {
            part.name.split(".layers.")[-1].split(".")[0]
            for p in self._found.parts.values()
            for part in p
            if ".layers." in part.name
        }
        return len(found)

    def parts(self, module: str) -> list[Part]:
        """Return the parts of a module; none: adapters cannot change it."""
        for name in (module, module.replace(_WRAPPED, "", 1), f"{self._prefix}{module}"):
            is_of_experts = name.rpartition(".")[0].rpartition(".")[0] in self._mixtures
            parts = (self._of_experts if is_of_experts else self._found).parts
            if found := parts.get(name):
                return found
        # transformers 5 names the head so where files have another name (GPT-NeoX, `embed_out`).
        return [self._found.by_name[HEAD]] if module == HEAD else []
