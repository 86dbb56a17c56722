"""Changes of tensors between a checkpoint and the decoder: pure functions, made at load.

A decoder's q, k and v may be one tensor of the checkpoint, in some order, its matrices may be
stored `[inputs, outputs]`, pairs that rotate together may lie side by side. A change makes the one
tensor that the decoder asks for from the one that is stored. It works on torch's device `meta`,
too, so shapes are checked by the same functions; a shape that does not fit raises RuntimeError.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.layers.dims import Dims, RopeConfig
from slipstream.models.axes import Change, Moves, QkvOrder, TensorNames

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(
    r"(?:^|\.)(self_attn\.\w+|mlp\.\w+|lm_head|model\.\w+)(?:\.norms\.\d+)?\.(weight|bias)$"
)
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_OUT = "self_attn.o_proj"
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def transposed(x: "Tensor") -> "Tensor":
    """Turn `[inputs, outputs]` into `[outputs, inputs]`; a vector stays as it is."""
    return x.t()


def part_of_qkv(x: "Tensor", order: QkvOrder, which: int, dims: Dims) -> "Tensor":
    """Return the rows of q, k or v (0, 1, 2) of `[heads and kv heads, ...]` in this order."""
    heads, groups, size, rest = dims.num_heads, dims.num_kv_heads, dims.head_size, x.shape[1:]
    if order is QkvOrder.BLOCKS:
        counts = (heads * size, groups * size, groups * size)
        return x.view(sum(counts), *rest).narrow(0, sum(counts[:which]), counts[which])
    if order is QkvOrder.HEADS:
        return x.view(groups, 3, size, *rest)[:, which].flatten(0, 1)
    each = heads // groups
    first, count = ((0, each), (each, 1), (each + 1, 1))[which]
    parts = x.view(groups, each + 2, size, *rest)
    return parts.narrow(1, first, count).flatten(0, 2)


def in_halves(x: "Tensor") -> "Tensor":
    """Put the rows 0, 2, 4 ... in front of 1, 3, 5 ..."""
    return x.view(len(x) // 2, 2, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def part_of_two(x: "Tensor", which: int) -> "Tensor":
    """Return the first or second half of the rows."""
    return x.reshape(2, len(x) // 2, *x.shape[1:])[which]


def head_order(
    size: int, rotated: int, interleaved: bool, padded: int, has_two: bool = False
) -> list[int]:
    """Return, for each of a head's `padded` numbers as the kernels have them, which stored one it
    is; -1: a zero.

    Kernels rotate the pairs (i, i + padded / 2). The first `rotated` of the `size` stored numbers
    rotate, in halves or interleaved; pairs of the others rotate by angles of zero. If a token
    `has_two` positions, each half rotates in halves of its own.
    """
    half = rotated // 2
    turning = (list(range(half)), list(range(half, rotated)))
    if interleaved:
        turning = (list(range(0, rotated, 2)), list(range(1, rotated, 2)))
    if has_two:
        parts = [list(range(i * half // 2, (i + 1) * half // 2)) for i in range(4)]
        turning = (parts[0] + parts[2], parts[1] + parts[3])
    still = list(range(rotated, size))
    middle = len(still) // 2
    zeros = [-1] * ((padded - size) // 2)
    return [*turning[0], *still[:middle], *zeros, *turning[1], *still[middle:], *zeros]


def arranged(x: "Tensor", order: Sequence[int], size: int, dim: int = 0) -> "Tensor":
    """Put the numbers of every head, of `size` along `dim`, in an order; -1: a zero."""
    before, behind = x.shape[:dim], x.shape[dim + 1 :]
    heads = x.reshape(*before, -1, size, *behind).transpose(0, dim + 1)  # [size, ...]
    out = heads.new_zeros(len(order), *heads.shape[1:])
    places = [place for place, source in enumerate(order) if source >= 0]
    out[places] = heads[[order[place] for place in places]]
    return out.transpose(0, dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads as they are stored, and as the kernels have them.

    size: numbers of a stored head; padded: of the kernels'.
    rotated: how many rotate, of all layers that rotate at all.
    interleaved: whether pairs that rotate lie side by side in the checkpoint.
    has_two: whether each half of what rotates has a position of its own.
    """

    size: int
    padded: int
    rotated: int
    interleaved: bool
    has_two: bool = False

    def order(self) -> list[int]:
        """Return the order of queries and keys; see `head_order`."""
        return head_order(self.size, self.rotated, self.interleaved, self.padded, self.has_two)

    def value_order(self) -> list[int]:
        """Return the order of values: zeros behind them."""
        return [*range(self.size), *[-1] * (self.padded - self.size)]


class Changes:
    """What makes each tensor of the decoder from the stored one.

    Args:
        names: how the family stores its tensors.
        dims: of the model, with heads as they are stored.
        heads: how they are changed for the kernels.
    """

    def __init__(self, names: TensorNames, dims: Dims, heads: Heads) -> None:
        self._names, self._dims, self._heads = names, dims, heads
        self._moved, self._value_moved = heads.order(), heads.value_order()
        self._still = list(range(heads.size))

    def of(self, name: str) -> Change | None:
        """Return what makes a tensor; None: it is the stored one."""
        part = _NAME.search(name)
        if part is None:
            ends = (end for end in self._names.changed if name.endswith(f".{end}"))
            return self._names.changed.get(next(ends, "")) or self._turned(name)
        name, is_matrix = part[1], part[2] == "weight"
        found: list[Change] = []
        if is_matrix and name in self._names.transposed:
            found.append(transposed)
        found += self._rows(name, part[2])
        found += self._columns(name) if is_matrix else []
        return _together(found)

    def _turned(self, name: str) -> Change | None:
        """Return what makes an expert's matrix from that of all of its rows, `[inputs, rows]`."""
        plain = _EXPERT.sub("{}", name)
        for ends in self._names.turned.values():
            for which, end in enumerate(ends):
                if plain.endswith(f".{end}"):
                    return lambda x: part_of_two(x.t(), which) if len(ends) > 1 else x.t()
        return None

    def moves(self, name: str) -> Moves | None:
        """Return how a matrix, whose name ends in no `.weight`, or a bias is changed; None: not."""
        is_bias = name.endswith(".bias")
        part = _NAME.search(name if is_bias else f"{name}.weight")
        if part is None:
            return None
        rows = _together(self._rows(part[1], part[2]))
        columns = None if is_bias else _together(self._columns(part[1]))
        is_transposed = not is_bias and part[1] in self._names.transposed
        if rows is None and columns is None and not is_transposed:
            return None
        return Moves(
            rows,
            columns,
            lambda outputs, inputs: self._shape(part[1], outputs, inputs),
            is_transposed,
        )

    def _rows(self, name: str, kind: str) -> list[Change]:
        names, heads, found = self._names, self._heads, list[Change]()
        if f"{name}.{kind}" in names.changed:
            found.append(names.changed[f"{name}.{kind}"])
        if name in _QKV and names.qkv is not QkvOrder.SPLIT:
            which = _QKV.index(name)
            found.append(lambda x: part_of_qkv(x, names.qkv, which, self._dims))
        if name in _GATE_UP and names.joins_gate_up:
            found.append(lambda x: part_of_two(x, _GATE_UP.index(name)))
        order = self._moved if name in (*_QKV[:2], *_QK_NORMS) else self._value_moved
        if name in (*_QKV, *_QK_NORMS) and order != self._still:
            dim = 1 if name in _QK_NORMS and names.norms_each_head else 0
            found.append(lambda x: arranged(x, order, heads.size, dim))
        return found

    def _columns(self, name: str) -> list[Change]:
        if name != _OUT or self._value_moved == self._still:
            return []
        return [lambda x: arranged(x, self._value_moved, self._heads.size, dim=1)]

    def _shape(self, name: str, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the stored matrix of which one of this shape is made."""
        size, padded = self._heads.size, self._heads.padded
        stored = self._names.own.get(name)
        if name in _QKV:
            alike = [each for each in _QKV if stored and self._names.own.get(each) == stored]
            heads = (self._dims.num_heads, self._dims.num_kv_heads, self._dims.num_kv_heads)
            counts = dict(zip(_QKV, heads, strict=True))
            whole = sum(counts[each] for each in alike) * size
            return whole or outputs // padded * size, inputs
        if name in _GATE_UP and self._names.joins_gate_up:
            return 2 * outputs, inputs
        return outputs, inputs // padded * size if name == _OUT else inputs


def _together(steps: Sequence[Change]) -> Change | None:
    if len(steps) == 1:
        return steps[0]
    return (lambda x: _through(x, steps)) if steps else None


def _through(x: "Tensor", steps: Sequence[Change]) -> "Tensor":
    for step in steps:
        x = step(x)
    return x


def with_changes(
    names: TensorNames, dims: Dims, ropes: Sequence[RopeConfig], interleaved: bool, padded: int
) -> TensorNames:
    """Return the names with all changes of a model whose heads get `padded` numbers."""
    # Layers that do not rotate have the order of the others.
    turning = {rope.rotated for rope in ropes} - {0}
    assert len(turning) <= 1, "heads rotate by the same share in all layers"
    rotated = turning.pop() if turning else dims.head_size
    whole = dims.head_size if rotated is None else rotated
    heads = Heads(dims.head_size, padded, whole, interleaved, any(each.has_two for each in ropes))
    found = Changes(names, dims, heads)
    return replace(names, change=found.of, moves=found.moves)
