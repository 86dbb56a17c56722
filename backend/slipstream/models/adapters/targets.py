"""The matrices of a decoder that adapters can change, by the checkpoint's names of modules."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.fuse.adapt import AdaptedPlace
from slipstream.models.axes import TensorNames

_OF_INPUTS = ("o_proj",)  # layers of whose matrices inputs are arranged, not outputs
_WRAPPED = "language_model."  # in the names of adapters that were trained in a larger model


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs of a place, and how they are made of a stored module's tensors."""

    place: str
    first: int  # output of the place
    outputs: int
    inputs: int
    name: str  # the decoder's
    names: TensorNames

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


class Targets:
    """All parts, by the names of modules."""

    def __init__(self, places: Sequence[AdaptedPlace], names: TensorNames) -> None:
        """Take the places of a decoder and the family's names of tensors."""
        self._parts: dict[str, list[Part]] = {}
        self._by_name: dict[str, Part] = {}  # the decoder's
        self._optional = names.optional
        for place in places:
            first = 0
            for name, outputs in zip(place.parts, place.sizes, strict=True):
                part = Part(place.name, first, outputs, place.inputs, name, names)
                stored = names.stored(f"{name}.weight").removesuffix(".weight")
                self._parts.setdefault(stored, []).append(part)
                self._by_name[name] = part
                first += outputs

    def of_decoder(self, layer: int, name: str) -> Part | None:
        """Return the part that is a layer's matrix by the decoder's name; None: there is none."""
        return self._by_name.get(f"model.layers.{layer}.{name}")

    @property
    def kinds(self) -> str:
        """The last parts of their names."""
        return ", ".join(sorted({name.rpartition(".")[2] for name in self._parts}))

    @property
    def num_layers(self) -> int:
        """How many layers have any."""
        found = {
            part.name.split(".layers.")[-1].split(".")[0]
            for p in self._parts.values()
            for part in p
            if ".layers." in part.name
        }
        return len(found)

    def parts(self, module: str) -> list[Part]:
        """Return the parts of a module; none: adapters cannot change it."""
        for name in (module, module.replace(_WRAPPED, "", 1), f"{self._optional}{module}"):
            if found := self._parts.get(name):
                return found
        return []
