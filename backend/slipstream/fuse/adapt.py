"""A rewrite behind that of fusion: places of linear layers that adapters can add terms to."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from slipstream.fuse.places import Gated, NormedAdd
from slipstream.fuse.rewrite import Place, fused, layers_of, places_of
from slipstream.kernels.elementwise.activation import GATES
from slipstream.layers.adapted import (
    AdaptedGatedLinear,
    AdaptedLinear,
    AdaptedLinearAdd,
    AdaptedNormLinear,
    Delta,
    StepGroups,
)
from slipstream.layers.adapted_experts import DOWN, GATE_UP, ExpertTerms
from slipstream.layers.adapted_heads import AdaptedHeads
from slipstream.layers.adapted_rows import (
    AdaptedKeys,
    AdaptedRows,
    VirtualKeys,
    VirtualRows,
    keys_of,
)
from slipstream.layers.attention import Attention, AttentionInputs
from slipstream.layers.decoder import AnyBlock, Decoder, InTurn, one_by_one
from slipstream.layers.embedding import Table
from slipstream.layers.experts import Experts, SharedExpert
from slipstream.layers.latent import LatentAttention
from slipstream.layers.linear import GatedLinear, Linear, NormLinear
from slipstream.layers.mlp import TwoStepMLP
from slipstream.layers.residual import Residual
from slipstream.layers.stages import Inlet

_OF_KEPT = ("o_proj", "gate_proj", "up_proj", "down_proj")  # behind the attention of a block


HEAD, EMBEDDING = "lm_head", "model.embed_tokens"  # the decoder's names
VIRTUAL = "virtual_tokens"  # the place of rows behind the vocabulary


class AdaptedPlace(NamedTuple):
    """A place that adapters can add terms to: matrices with the same inputs, stacked."""

    name: str
    parts: tuple[str, ...]  # the decoder's names of the matrices
    sizes: tuple[int, ...]  # outputs of each
    inputs: int
    linear: Linear | None = None  # None: the embedding, or matrices of heads
    table: Table | None = None  # of head or embedding
    num_experts: int = 0  # of whose matrices these are
    takes_turns: bool = False  # see `ExpertsConfig`
    key_refusal: str = ""  # why adapters cannot bring keys and values of the layer


def adapt(decoder: Decoder, groups: StepGroups, vocab_size: int) -> list[AdaptedPlace]:
    """Wrap the places of a decoder's blocks, in place; what a step without groups computes is the
    same. Routers are not among them. `vocab_size` is the whole model's. Later stages of a pipeline
    have no ends.
    """
    decoder.in_turn = _in_turn(decoder.in_turn, groups)
    found: list[AdaptedPlace] = []
    apart: list[AdaptedPlace] = []  # that tables do not have, or apart from others
    num_experts = 0  # of all layers before
    for number, (prefix, layer) in layers_of(decoder):
        is_last = number == len(decoder.blocks) - 1
        if isinstance(layer, LatentAttention):
            apart.append(_heads(layer, prefix, groups, is_last))
        if isinstance(layer, Experts) and not layer.config.scales_inputs:
            apart += _experts(layer, prefix, groups, is_last, 2 * num_experts)
            num_experts += layer.config.routing.num_experts
        if isinstance(layer, Experts) and layer.shared is not None:
            layer, prefix = layer.shared, f"{prefix}.shared_expert"
        if not isinstance(layer, Attention | LatentAttention | SharedExpert | TwoStepMLP):
            continue
        if isinstance(layer, Attention):
            layer.prefix = AdaptedKeys(keys_of(number), groups)
        for name, linear in list(_linears_of(layer)):
            assert linear.stacked is not None, "it was read"
            parts = tuple(f"{prefix}.{part}" for part in linear.stacked.names)
            which = "kept" if is_last and linear.stacked.names[0] in _OF_KEPT else "tokens"
            delta = Delta(parts[0], linear, groups, which, len(found))
            setattr(layer, name, AdaptedLinear(linear, delta))
            sizes = (linear.stacked.outputs, linear.stacked.inputs)
            found.append(AdaptedPlace(parts[0], parts, *sizes, linear))
        for name, place in list(places_of(layer)):
            stacked = place.linear.stacked
            if stacked is None:
                continue
            parts = tuple(f"{prefix}.{part}" for part in stacked.names)
            which = "kept" if is_last and stacked.names[0] in _OF_KEPT else "tokens"
            delta = Delta(parts[0], place.linear, groups, which, len(found))
            setattr(layer, name, _adapted(place, delta))
            sizes = (stacked.outputs, stacked.inputs)
            own = AdaptedPlace(parts[0], parts, *sizes, place.linear)
            found.append(own._replace(key_refusal=_key_refusal(layer)))
    if isinstance(decoder.embedding, Inlet):
        decoder.embedding.look = VirtualKeys(groups, vocab_size)
        return found + apart
    return found + apart + _ends(decoder, groups, vocab_size)


def _in_turn(without_terms: InTurn, groups: StepGroups) -> InTurn:
    """Return how a step's blocks are applied: one by one beside adapters, whose terms differ."""

    def apply(
        blocks: Sequence[AnyBlock],
        residual: Residual,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[Tensor],
    ) -> None:
        chosen = one_by_one if groups.are_there else without_terms
        chosen(blocks, residual, inputs, caches)

    return apply


def _key_refusal(layer: object) -> str:
    """Say why adapters cannot bring a layer's keys and values; empty: they can."""
    if isinstance(layer, Attention) and layer.k_norm is not None:
        return "keys are normalised as they are rotated"
    if isinstance(layer, Attention) and layer.has_two_positions:
        return "tokens of a prompt see each other, and have two positions"
    return "keys and values are made of latents" if isinstance(layer, LatentAttention) else ""


def _linears_of(layer: object) -> Iterator[tuple[str, Linear]]:
    """Yield the linear layers that are in no place, by their names in a layer."""
    for name, part in vars(layer).items():
        if isinstance(part, Linear):
            yield name, part


def _heads(layer: LatentAttention, prefix: str, groups: StepGroups, is_last: bool) -> AdaptedPlace:
    """Make the matrices of heads ready that the layer has of `kv_b_proj`."""
    latent, name = layer.latent, f"{prefix}.kv_b_proj"
    rows, is_fixed = (latent.plain, latent.value), layer.out.linear.is_sliced
    layer.to_latents = AdaptedHeads(layer.to_latents, name, groups, "tokens", rows, True, is_fixed)
    which = "kept" if is_last else "tokens"
    layer.of_latents = AdaptedHeads(layer.of_latents, name, groups, which, rows, False, is_fixed)
    return AdaptedPlace(name, (name,), (layer.num_heads * sum(rows),), latent.rank)


def _experts(
    layer: Experts, prefix: str, groups: StepGroups, is_last: bool, first: int
) -> list[AdaptedPlace]:
    """Make routed experts ready, whose matrices are in tables from number `first` on."""
    layer.adapt = ExpertTerms(layer, prefix, groups, "kept" if is_last else "tokens", first)
    count, inner, hidden = len(layer.down.values), layer.down.inputs, layer.down.outputs
    turns = layer.config.takes_turns
    found = []
    for end, names, outputs, inputs in (
        (GATE_UP, ("gate_proj", "up_proj"), inner, hidden),
        (DOWN, ("down_proj",), hidden, inner),
    ):
        parts = tuple(f"{prefix}.experts.{i}.{name}" for i in range(count) for name in names)
        sizes = (outputs,) * len(parts)
        given = f"{prefix}.{end}", parts, sizes, inputs
        found.append(AdaptedPlace(*given, num_experts=count, takes_turns=turns))
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
        if place.gate in GATES and not delta.is_fixed:
            return AdaptedGatedLinear(place, place.place, delta)
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
