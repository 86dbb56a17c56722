"""Blocks of a decoder as one call of the processor's kernels, where these have all that is in them.

A block is checked once for its form, and once a step for stages that were added to its layers.
"""

import ctypes
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.fuse.places import FusedGatedLinear, FusedLinearAdd, FusedNormLinear
from slipstream.fuse.slices import SlicedGatedLinear, SlicedLinearAdd, SlicedNormLinear
from slipstream.kernels.attention.cpu import MOST_GROUP, takes_scores
from slipstream.kernels.cpu.native import (
    Cache,
    Layer,
    Mixture,
    Product,
    Rotation,
    Step,
    address,
    library,
    num_threads,
)
from slipstream.kernels.elementwise.rope_cpu import cache_struct
from slipstream.kernels.experts.cpu import GATES, choice_of, experts_of
from slipstream.kernels.gemm.cpu_packed import product_of
from slipstream.kernels.gemm.cpu_packing import LAYOUT
from slipstream.kernels.gemm.op import Around
from slipstream.kernels.gemm.packing import TILE
from slipstream.kernels.runtime.registry import CPU
from slipstream.layers.adapted import AdaptedGatedLinear, AdaptedLinearAdd, AdaptedNormLinear, Delta
from slipstream.layers.attention import Attention, AttentionInputs
from slipstream.layers.decoder import AnyBlock, Block, Decoder
from slipstream.layers.experts import Experts
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.norm import Norm
from slipstream.quant.forms import as_rows

_ADAPTED = AdaptedNormLinear | AdaptedGatedLinear | AdaptedLinearAdd
Place = NormLinear | GatedLinear | LinearAdd
_PLACES = operator.attrgetter("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
_OF_ATTENTION = operator.attrgetter("attention.qkv", "attention.out")
_RANKS = operator.attrgetter("ranks")
_SLICED = SlicedNormLinear | SlicedGatedLinear | SlicedLinearAdd


class WholeBlocks:
    """All blocks of a decoder; see `whole_blocks`, which makes it."""

    def __init__(self, blocks: Sequence[AnyBlock], layers: Sequence[Layer]) -> None:
        self._blocks = list(blocks)
        self._made = list(layers)  # which keep what they point to
        self._layers = (Layer * len(layers))(*layers)
        self._places = _all_places(blocks)
        self._linears = [place.linear for place in self._places]
        self._mixtures = [each.mlp for each in blocks if isinstance(each.mlp, Experts)]
        self._seen = self._places  # that stood there in the last step
        self._shared: list[int] = []  # of each layer the number of its step
        self._steps: ctypes.Array[Step] = (Step * 0)()
        self._pointers: list[int] = []  # to the caches
        self._deltas: list[Delta] = []  # of adapters, in these
        self._are_taken = True  # below their adapters they are those of the start

    def run(
        self,
        blocks: Sequence[AnyBlock],
        x: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[Tensor],
    ) -> Tensor | None:
        """Return the sum behind the blocks, `[n, hidden]` or the rows wanted; None: not done.

        Args:
            blocks: of the decoder, now.
            x: rows of the embedding, changed in place.
            inputs, caches: of each layer.
        """
        if blocks != self._blocks or not self._can_take(_all_places(blocks)):
            return None
        if [*map(_RANKS, self._linears)].count(None) < len(self._linears):
            return None
        if {*map(type, inputs)} != {AttentionInputs}:
            return None
        if any(each.adapt is not None and each.adapt.in_step for each in self._mixtures):
            return None
        if not x.is_contiguous():
            return None
        self._put(inputs, caches)
        out, wanted = x, inputs[-1].wanted
        if wanted is not None:
            out = torch.empty(len(wanted), x.shape[1], dtype=x.dtype)
        found = library()
        assert found is not None, "the blocks were made for it"
        sizes = len(x), out.data_ptr(), num_threads()
        found.blocks(self._layers, len(self._layers), x.data_ptr(), *sizes)
        return out

    def _put(self, inputs: Sequence[AttentionInputs], caches: Sequence[Tensor]) -> None:
        """Write the step and the caches into the structures of the layers, as far as they change.

        Layers of the same inputs share a step.
        """
        own = {id(each): each for each in inputs}
        places = {at: number for number, at in enumerate(own)}
        shared = [places[id(each)] for each in inputs]
        if shared != self._shared:
            self._shared, self._steps = shared, (Step * len(own))()
            for layer, number in zip(self._layers, shared, strict=True):
                layer.step = ctypes.addressof(self._steps[number])
        for number, each in enumerate(own.values()):
            self._steps[number] = _step(each)
        pointers = [cache.data_ptr() for cache in caches]
        if pointers != self._pointers:
            self._pointers = pointers
            for layer, cache in zip(self._layers, caches, strict=True):
                layer.cache = cache_struct(cache)

    def _can_take(self, places: list[Place]) -> bool:
        """Whether these places are the ones taken, with adapters that no row of the step has."""
        if places != self._seen:  # they seldom change, and a look at each takes as long as a GEMM
            self._seen, self._deltas = places, []
            self._are_taken = [_bare(place, self._deltas) for place in places] == self._places
        if not self._deltas or not self._deltas[0].has_step:  # all look at the same step
            return self._are_taken
        return self._are_taken and not any(delta.is_active for delta in self._deltas)


def whole_blocks(decoder: Decoder) -> WholeBlocks | None:
    """Return all blocks of a decoder in one; None where the kernels lack something of theirs."""
    layers = [_layer(block) for block in decoder.blocks]
    found = [layer for layer in layers if layer is not None]
    if not found or len(found) < len(layers):
        return None
    return WholeBlocks(decoder.blocks, found)


def _plain(place: object) -> object:
    """Return a place without its slices, which these kernels do not need: rows are their own."""
    return place._place if isinstance(place, _SLICED) else place


def _all_places(blocks: Sequence[AnyBlock]) -> list[Place]:
    """Return the places of blocks that were taken, as they are now: others may stand there."""
    return [
        place
        for block in blocks
        for place in (_OF_ATTENTION if isinstance(block.mlp, Experts) else _PLACES)(block)
    ]


def _bare(place: Place, deltas: list[Delta]) -> Place:
    """Return a place without its adapters, which go into `deltas`."""
    while isinstance(place, _ADAPTED):
        deltas.append(place._delta)
        place = place.without_terms
    return place


def _layer(block: AnyBlock) -> Layer | None:
    """Return the structure of a block without its step and cache; None if it is not taken."""
    norms = block.input_norm, block.mlp_norm
    if type(block) is not Block or not all(type(norm) is Norm for norm in norms):
        return None
    attention, mlp = block.attention, block.mlp
    if type(attention) is not Attention or not attention.is_plain:
        return None
    mixture = None
    places: list[Place] = [attention.qkv, attention.out]
    kinds: tuple[type, ...] = FusedNormLinear, FusedLinearAdd, FusedGatedLinear, FusedLinearAdd
    if type(mlp) is GatedMLP:
        places += [mlp.gate_up, mlp.down]
    elif type(mlp) is not Experts or (mixture := _mixture(mlp, block.mlp_norm)) is None:
        return None
    plain = [_plain(place) for place in places]
    if not all(type(place) is kind for place, kind in zip(plain, kinds, strict=False)):
        return None
    return _of_linears(attention, [place.linear for place in places], norms, mixture)


def _mixture(experts: Experts, norm: object) -> Mixture | None:
    """Return the structure of a mixture; None if it is not taken.

    In deterministic mode it is not, as the router's sums have another order here.
    """
    router, matrices = experts.router, (experts.gate_up, experts.down)
    packings = [None if each.groups is None else each.groups.packing for each in matrices]
    are_taken = all(each is not None and each.layout == LAYOUT for each in packings)
    is_plain = experts.shared is None and experts.out_norm is None and not experts.is_fixed
    choice = choice_of(experts.config.routing, experts.correction)
    weights = None if router.matrix is None else as_rows(router.matrix.values, CPU)
    if not are_taken or not is_plain or choice is None or weights is None:
        return None
    assert isinstance(norm, Norm), "blocks with others are not taken"
    assert weights.groups is not None, "of rows"
    around = Around(norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one)
    of_router = product_of(weights.values, weights.groups, around._replace(bias=router.bias))
    top_k, gate = experts.config.routing.top_k, GATES[experts.config.gate]
    first = experts_of(experts.gate_up, top_k, around._replace(gate=gate))
    return Mixture(of_router.contents, first, experts_of(experts.down, top_k), choice)


def _of_linears(
    attention: Attention,
    linears: Sequence[Linear],
    norms: tuple[object, object],
    mixture: Mixture | None,
) -> Layer | None:
    """Return the structure of a block; with a mixture only attention has linear layers."""
    q_width, kv_width, _ = attention.sizes
    heads = q_width // attention.head_size
    if attention.head_size % 2 or q_width > MOST_GROUP * kv_width:
        return None
    if not takes_scores(attention.changed, heads):
        return None
    of = (norms[0], None, norms[1], None)
    products = [
        _product(linear, norm, gated=place == 2)
        for place, (linear, norm) in enumerate(zip(linears, of, strict=False))
    ]
    found = [product for product in products if product is not None]
    if len(found) < len(products):
        return None
    norms_of_heads = address(attention.q_norm), address(attention.k_norm)
    where = *norms_of_heads, address(attention.factors), None, None
    how = attention.eps, attention.are_late
    rotation = Rotation(attention.cos_sin.data_ptr(), *where, *how)
    found += [Product()] * (len(of) - len(found))
    pointer = None if mixture is None else ctypes.pointer(mixture)
    sinks = address(attention.changed.sinks)
    return Layer(*found, rotation, Cache(), None, pointer, sinks, heads, attention.scale)


def _product(linear: Linear, norm: object, gated: bool) -> Product | None:
    """Return the structure of a product; None where its weights are not the kernels' own."""
    matrix = linear.matrix
    groups = None if matrix is None else matrix.groups
    if matrix is None or groups is None or groups.packing.layout != LAYOUT:
        return None
    if groups.order is not None or groups.factors is not None:
        return None
    if gated and groups.packing.outputs % (2 * TILE):
        return None
    around = Around(bias=linear.bias, gate="silu" if gated else "")
    if isinstance(norm, Norm):
        around = around._replace(norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one)
    return product_of(matrix.values, groups, around).contents


def _step(inputs: AttentionInputs) -> Step:
    """Return the structure of a step; its tensors are alive as long as `inputs`."""
    rows, wanted = inputs.rows, inputs.wanted
    tables = rows.block_tables
    of = rows.positions, rows.slots, tables
    assert all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in of), "columns are contiguous"
    where = rows.positions.data_ptr(), rows.slots.data_ptr(), tables.data_ptr(), tables.stride(0)
    lengths = rows.lengths.data_ptr(), rows.query_starts.data_ptr()
    kept = address(wanted), 0 if wanted is None else len(wanted)
    # A step of decodes alone may have chunks' starts that mean nothing.
    count = len(rows.lengths) if rows.max_queries else rows.num_decodes
    return Step(*where, *lengths, *kept, count, rows.num_decodes, inputs.window, 0)
