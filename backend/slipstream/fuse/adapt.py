"""A rewrite behind that of fusion: places of linear layers that adapters can add terms to."""

from typing import NamedTuple

from slipstream.fuse.places import Gated, NormedAdd
from slipstream.fuse.rewrite import Place, fused, layers_of, places_of
from slipstream.layers.adapted import (
    AdaptedGatedLinear,
    AdaptedLinearAdd,
    AdaptedNormLinear,
    AdaptedRows,
    Delta,
    StepGroups,
    VirtualRows,
)
from slipstream.layers.attention import Attention
from slipstream.layers.decoder import Decoder
from slipstream.layers.embedding import Table
from slipstream.layers.linear import GatedLinear, Linear, NormLinear
from slipstream.layers.mlp import TwoStepMLP

_OF_KEPT = ("o_proj", "gate_proj", "up_proj", "down_proj")  # behind the attention of a block


HEAD, EMBEDDING = "lm_head", "model.embed_tokens"  # the decoder's names
VIRTUAL = "virtual_tokens"  # the place of rows behind the vocabulary


class AdaptedPlace(NamedTuple):
    """A place that adapters can add terms to: matrices with the same inputs, stacked."""

    name: str
    parts: tuple[str, ...]  # the decoder's names of the matrices
    sizes: tuple[int, ...]  # outputs of each
    inputs: int
    linear: Linear | None = None  # None: the embedding
    table: Table | None = None  # of head or embedding


def adapt(
    decoder: Decoder, groups: StepGroups, vocab_size: int | None = None
) -> list[AdaptedPlace]:
    """Wrap the places of a decoder's blocks, in place; what a step without groups computes is the
    same. Matrices of experts, of their router and of latent attention are not among them.
    `vocab_size` is the whole model's, if ranks share it.
    """
    found: list[AdaptedPlace] = []
    for number, (prefix, layer) in layers_of(decoder):
        is_last = number == len(decoder.blocks) - 1
        if not isinstance(layer, Attention | TwoStepMLP):
            continue
        for name, place in list(places_of(layer)):
            stacked = place.linear.stacked
            if stacked is None:
                continue
            parts = tuple(f"{prefix}.{part}" for part in stacked.names)
            which = "kept" if is_last and stacked.names[0] in _OF_KEPT else "tokens"
            delta = Delta(parts[0], place.linear, groups, which, len(found))
            setattr(layer, name, _adapted(place, delta))
            sizes = (stacked.outputs, stacked.inputs)
            found.append(AdaptedPlace(parts[0], parts, *sizes, place.linear))
    found += _ends(decoder, groups, vocab_size or decoder.head.table.shape[0])
    return found


def _ends(decoder: Decoder, groups: StepGroups, vocab_size: int) -> list[AdaptedPlace]:
    """Make the head and the embedding ready."""
    head, table = decoder.head, decoder.head.table
    outputs, inputs = table.shape
    delta = Delta(HEAD, head.product.linear, groups, "head")
    head.product = _norm_linear(head.product, delta)
    found = [AdaptedPlace(HEAD, (HEAD,), (outputs,), inputs, head.product.linear, table)]
    decoder.embedding.virtual = VirtualRows(VIRTUAL, groups, vocab_size)
    embedding, name = decoder.embedding, EMBEDDING
    embedding.own = AdaptedRows(name, groups, embedding.own)
    rows, width = embedding.table.shape
    found.append(AdaptedPlace(name, (name,), (rows,), width, None, embedding.table))
    return found


def _adapted(place: Place, delta: Delta) -> Place:
    if isinstance(place, Gated):
        place.place = _norm_linear(place.place, delta)
        return place
    if isinstance(place, NormedAdd):
        place.place = AdaptedLinearAdd(place.place, delta)
        return place
    if isinstance(place, NormLinear):
        return _norm_linear(place, delta)
    if isinstance(place, GatedLinear):
        return AdaptedGatedLinear(place, _product(place.linear), delta)
    return AdaptedLinearAdd(place, delta)


def _norm_linear(place: NormLinear, delta: Delta) -> NormLinear:
    return AdaptedNormLinear(place, _product(place.linear), delta)


def _product(linear: Linear) -> NormLinear:
    """Return the place of a linear layer behind a norm that leaves nothing to its reader."""
    made = fused(NormLinear(linear))
    assert isinstance(made, NormLinear)
    return made
