"""The part of each tensor that a rank of several holds, by the decoder's names. No torch above.

Matrices that widen a row are cut by outputs (q, k, v, gate, up), those that narrow it by inputs
(`o_proj`, `down_proj`), whose results the ranks add. Heads of keys and values are repeated where
there are more ranks than heads. Embedding and head are cut by tokens. Widths that ranks do not
divide get zeros behind them, which change no result. All else is on every rank. Biases of what is
added are on rank 0 alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor along `dim`: of `total` numbers there, `count` from `begin` on.

    What lies behind `total` is zeros. `is_zero`: the rank has zeros in the place of the tensor.
    """

    dim: int
    begin: int
    count: int
    total: int
    is_zero: bool = False

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor whose part has this one."""
        return (*shape[: self.dim], self.total, *shape[self.dim + 1 :])

    @property
    def stored(self) -> tuple[int, int]:
        """Begin and number of what the tensor has of the part."""
        begin = min(self.begin, self.total)
        return begin, 0 if self.is_zero else min(self.count, self.total - begin)

    def part_of(self, x: "Tensor") -> "Tensor":
        """Return what the tensor has of the part, a view."""
        return x.narrow(self.dim, *self.stored)

    def fill(self, out: "Tensor", part: "Tensor") -> None:
        """Write the part, and the zeros behind it."""
        count = self.stored[1]
        out.narrow(self.dim, 0, count).copy_(part)
        out.narrow(self.dim, count, self.count - count).zero_()


class MatrixCut(NamedTuple):
    """A part of a matrix: of its rows, or of its inputs.

    copies: matrices that lie under one another, each of which has such a part.
    """

    rows: Cut | None
    inputs: Cut | None
    copies: int

    @classmethod
    def of(cls, cut: Cut) -> "MatrixCut":
        """Return the cut of one matrix."""
        return cls(None, cut, 1) if cut.dim else cls(cut, None, 1)

    def whole(self, rows: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the matrix whose part has this one."""
        if self.rows is not None:
            return self.copies * self.rows.total, inputs
        assert self.inputs is not None, "something is cut"
        return rows, self.inputs.total


# Ends of names, the dimension that is cut, and by what: even parts, heads of keys and values,
# widths, tokens; `row`: not cut, of rank 0. The first that fits.
_RULES = tuple(
    (re.compile(rf"(?:^|\.){pattern}$"), dim, kind)
    for pattern, dim, kind in (
        (r"self_attn\.q_proj\.(?:weight|bias)", 0, "even"),
        (r"self_attn\.(?:q|kv?|v)_b_proj\.weight", 0, "even"),
        (r"self_attn\.[kv]_proj\.(?:weight|bias)", 0, "keys"),
        (r"self_attn\.o_proj\.weight", 1, "even"),
        (r"self_attn\.o_proj\.bias", 0, "row"),
        (r"self_attn\.sinks", 0, "even"),
        (r"mlp\.(?:gate|up)_proj\.(?:weight|bias)", 0, "inner"),
        (r"mlp\.experts\.\d+\.(?:gate|up)_proj\.(?:weight|bias)", 0, "expert"),
        (r"mlp\.shared_expert\.(?:gate|up)_proj\.weight", 0, "shared"),
        (r"mlp\.down_proj\.weight", 1, "inner"),
        (r"mlp\.experts\.\d+\.down_proj\.weight", 1, "expert"),
        (r"mlp\.shared_expert\.down_proj\.weight", 1, "shared"),
        (r"mlp\.(?:experts\.\d+\.)?down_proj\.bias", 0, "row"),
        (r"mlp\.experts\.gate_up_proj", 2, "both of expert"),
        (r"mlp\.experts\.gate_up_proj_bias", 1, "both of expert"),
        (r"mlp\.experts\.down_proj", 1, "expert"),
        (r"mlp\.experts\.down_proj_bias", 1, "row"),
        (r"(?:model\.embed_tokens|lm_head)\.(?:weight|bias)", 0, "tokens"),
    )
)
_NORMS = re.compile(r"self_attn\.([qk])_norm\.(?:weight|bias)$")
_TOGETHER = re.compile(r"(?:^|\.)mlp\.experts\.(?:gate_up|down)_proj$")
_NORMS_EACH = re.compile(r"(?<=self_attn\.)([qk])(_norm\.norms\.)(\d+)(?=\.)")
_OF_HEAD = re.compile(r"\.norms\.\d+\.weight$")


@dataclass(frozen=True, slots=True)
class Cuts:
    """The parts of rank `rank` of `size`.

    num_heads, num_kv_heads: of the whole model.
    widths: of the whole model, by the kinds of `_RULES`; the last ranks have zeros behind them.
    norms: whether weights of norms of queries and keys are of all heads, and cut like them.
    num_experts: of a mixture.
    """

    rank: int
    size: int
    num_heads: int
    num_kv_heads: int
    widths: Mapping[str, int]
    norms: bool
    num_experts: int = 0

    def of(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return the cut by which the rank has `shape` of a tensor; None: it has all of it."""
        for pattern, dim, kind in _RULES:
            if pattern.search(name):
                return self._cut(dim, shape[dim], kind)
        if self.norms and (found := _NORMS.search(name)):
            return self._cut(0, shape[0], "even" if found[1] == "q" else "keys")
        return None

    def of_matrix(self, name: str, rows: int, inputs: int) -> MatrixCut | None:
        """Return the cut by which the rank has `[rows, inputs]` of a quantised matrix.

        Its name ends in no `.weight`, and experts of all in one are under one another.
        """
        if _TOGETHER.search(name) is None:
            cut = self.of(f"{name}.weight", (rows, inputs))
            return None if cut is None else MatrixCut.of(cut)
        count = self.num_experts
        cut = self.of(name, (count, inputs, rows // count))
        assert cut is not None, "experts are cut"
        return MatrixCut(None, cut, count) if cut.dim == 1 else MatrixCut(cut, None, count)

    def skips(self, name: str) -> bool:
        """Return whether other ranks may have all of a tensor: the norm of one head."""
        return self.norms and _OF_HEAD.search(name) is not None

    def number(self, name: str) -> str:
        """Return a name with the number of a head in the whole model for that of the rank's own."""

        def renumber(found: re.Match[str]) -> str:
            heads, copies = self.num_heads, 1
            if found[1] == "k":
                heads, copies = self.num_kv_heads, self._copies
            each = heads * copies // self.size
            return f"{found[1]}{found[2]}{self.rank // copies * each + int(found[3])}"

        return _NORMS_EACH.sub(renumber, name)

    @property
    def _copies(self) -> int:
        """Ranks that have the same heads of keys and values."""
        return max(1, self.size // self.num_kv_heads)

    def _cut(self, dim: int, count: int, kind: str) -> Cut:
        if kind == "row":
            return Cut(dim, 0, count, count, is_zero=self.rank > 0)
        if kind in self.widths:
            return Cut(dim, self.rank * count, count, self.widths[kind])
        copies = self._copies if kind == "keys" else 1
        return Cut(dim, self.rank // copies * count, count, count * self.size // copies)
