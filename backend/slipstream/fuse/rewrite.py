"""The rewrite: find the places of linear layers in a model and put fused ones there."""

from collections.abc import Iterator

from slipstream.fuse.places import (
    FusedGatedLinear,
    FusedLinearAdd,
    FusedNormLinear,
    Gated,
    NormedAdd,
)
from slipstream.fuse.repeat import Repeating
from slipstream.fuse.slices import SlicedGatedLinear, SlicedLinearAdd, SlicedNormLinear
from slipstream.fuse.whole import whole_blocks
from slipstream.kernels.elementwise.activation import EVERY
from slipstream.layers.decoder import Decoder
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear

# That a GEMM may fuse: a gate, and activations of every column.
FUSED_GATES = ("silu", *(EVERY + name for name in ("gelu", "gelu, by tanh", "relu")))
Place = NormLinear | GatedLinear | LinearAdd


def rewrite(decoder: Decoder) -> Decoder:
    """Fuse all places of a decoder's blocks and head, in place; what it computes is the same."""
    for layer in _layers(decoder):
        found = dict(places_of(layer))
        readers = [place.linear for place in found.values() if isinstance(place, LinearAdd)]
        feeds = readers[0] if len(readers) == 1 else None
        for name, place in found.items():
            setattr(layer, name, fused(place, feeds))
    decoder.whole = whole_blocks(decoder)
    decoder.in_turn = Repeating()
    return decoder


def places(decoder: Decoder) -> Iterator[tuple[str, Place]]:
    """All places of a decoder by their names in its layers."""
    for layer in _layers(decoder):
        for name, place in places_of(layer):
            yield "head" if layer is decoder.head else name, place


def fused(place: Place, feeds: Linear | None = None) -> Place:
    """Return the fused form of a plain place; `feeds` reads what is gated."""
    if isinstance(place, NormLinear):
        return _norm_linear(place)
    if isinstance(place, GatedLinear):
        return _gated_linear(place, feeds)
    return _linear_add(place)


def _norm_linear(place: NormLinear) -> NormLinear:
    made = FusedNormLinear(place.linear, place.leaves_scales)
    return SlicedNormLinear(made) if place.linear.is_sliced else made


def _gated_linear(place: GatedLinear, feeds: Linear | None) -> GatedLinear:
    if place.gate not in FUSED_GATES:
        return Gated(_norm_linear(NormLinear(place.linear)), place.gate)
    made = FusedGatedLinear(place.linear, place.gate, feeds)
    return SlicedGatedLinear(made) if place.linear.is_sliced else made


def _linear_add(place: LinearAdd) -> LinearAdd:
    made: LinearAdd = FusedLinearAdd(place.linear)
    made = SlicedLinearAdd(made) if place.linear.is_sliced else made
    return made if place.norm is None else NormedAdd(made, place.norm)


def layers_of(decoder: Decoder) -> Iterator[tuple[int, tuple[str, object]]]:
    """Yield the layers of each block: its number, their prefix in the decoder's names, and they."""
    for number, block in enumerate(decoder.blocks):
        yield number, (f"model.layers.{number}.self_attn", block.attention)
        yield number, (f"model.layers.{number}.mlp", block.mlp)


def _layers(decoder: Decoder) -> Iterator[object]:
    for _, (_, layer) in layers_of(decoder):
        yield layer
    yield decoder.head


def places_of(layer: object) -> Iterator[tuple[str, Place]]:
    """Yield the places of a layer by their names in it."""
    for name, part in vars(layer).items():
        if isinstance(part, Place):
            yield name, part
