"""Places of linear layers to which adapters add low-rank terms.

Each wraps a place, fused or not, and is that place in every step of which no row has an adapter
with a term for it. Else the place runs as it does without adapters and the term is added to what it
made; so rows without an adapter, and rows whose term is zero, keep their bits. A gate needs its
product complete: such a place multiplies, adds and then applies the gate. Of one or two rows a GEMM
may add the terms itself, where it adds a bias.

Kernels add the terms of adapters in a step's tables, which lie in device memory. Those of adapters
that they do not take torch adds, one after another, to groups of the step's rows. No row is in
both, and none's bits depend on what is added to others, or by what.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.activation import GATES, activate
from slipstream.kernels.elementwise.eight_bits import Quantized
from slipstream.kernels.elementwise.norm import RmsNorm
from slipstream.kernels.elementwise.scales import Scales
from slipstream.kernels.gemm.linear import Operand
from slipstream.kernels.gemm.op import MOST_ADAPTED_ROWS, TermTable
from slipstream.kernels.lora.add import add, times
from slipstream.kernels.lora.terms import Table, expand, expand_gated, shrink
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.norm import Norm, RowNorm, identity
from slipstream.layers.residual import Residual


class Term(NamedTuple):
    """A low-rank term of some outputs of a linear layer, or what takes their place.

    With a `gain` the layer's own result is added so many times more (DoRA). Until magnitudes are
    folded (`magnitudes.py`) `gain` holds them, and `b` is f32. Without `a`, `b` is a whole matrix
    that takes the place of the layer's (`modules_to_save`). Of routed experts that follow each
    other from `first` on, A and B may be `[e, r, inputs]` and `[e, outputs, r]`.
    """

    first: int  # output
    a: Tensor | None  # [r, inputs]
    b: Tensor  # [outputs, r], times the adapter's scaling; [outputs, inputs] without `a`
    gain: Tensor | None = None  # [outputs] f32

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, once `b` is in the dtype of `a`."""
        itemsize = (self.b if self.a is None else self.a).element_size()
        of_b = self.b.numel() * itemsize
        return of_b + sum(x.nbytes for x in (self.a, self.gain) if x is not None)

    def to(self, device: torch.device) -> "Term":
        """Return it on a device."""
        a, b, gain = (None if x is None else x.to(device) for x in self[1:])
        assert b is not None, "it always has that"
        return Term(self.first, a, b, gain)


Terms = Mapping[str, Sequence[Term]]  # of an adapter, by the places' names


class Group(NamedTuple):
    """The rows of a step that have one adapter."""

    terms: Terms
    rows: Tensor  # [m] i64


class KeyRows(NamedTuple):
    """Tokens of a step whose keys and values an adapter brings (prefix tuning)."""

    terms: Terms
    rows: Tensor  # [m] i64
    places: Tensor  # [m] i64: which of the adapter's


class StepGroups:
    """The tables and groups of the step that runs; none where no row has an adapter.

    `tokens` are of all its tokens, `kept` of those that the last block goes on with behind its
    attention, `sampled` of the rows that are sampled; `head` of those that the head sees now.
    """

    def __init__(self) -> None:
        self.tokens: Sequence[Group] = ()
        self.kept: Sequence[Group] = ()
        self.sampled: Sequence[Group] = ()
        self.head: Sequence[Group] = ()
        self.tables: Mapping[str, Table] = {}  # of `tokens` and `kept`
        self.key_rows: list[KeyRows] = []  # the embedding finds them

    @property
    def are_there(self) -> bool:
        """Whether a row of the step may have an adapter."""
        return bool(self.tokens or self.kept or self.tables)

    def clear(self) -> None:
        """End the step."""
        self.tokens = self.kept = self.sampled = self.head = ()
        self.tables = {}
        self.key_rows = []


class Started(NamedTuple):
    """What a place's terms are made of."""

    x: Tensor  # rows for groups, `[n, inputs]`; before a norm if it has none and kernels norm
    partial: Tensor | None  # what `shrink` made for kernels


class Delta:
    """What adapters add to one place.

    Args:
        name: of the place.
        linear: its layer.
        groups: of the step.
        which: the field of `groups` whose rows the place sees.
        number: of the place in tables.
    """

    def __init__(
        self, name: str, linear: Linear, groups: StepGroups, which: str, number: int = 0
    ) -> None:
        self.name, self.is_fixed = name, linear.is_sliced
        self._linear = linear
        self._groups, self._which, self._number = groups, which, number

    @property
    def has_step(self) -> bool:
        """Whether rows of the step may have an adapter, here or elsewhere."""
        return self._groups.are_there

    @property
    def is_active(self) -> bool:
        """Whether rows of the step have a term here, or may have one.

        So is every place beside keys that an adapter brings: they take the place of complete ones.
        """
        return self._table is not None or bool(self._groups.key_rows) or bool(self.groups())

    @property
    def _table(self) -> Table | None:
        return self._groups.tables.get(self._which)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Outputs of each part of the place."""
        assert self._linear.stacked is not None, "tables have places that were read"
        return self._linear.stacked.outputs

    def groups(self) -> list[Group]:
        """Return the groups that have a term here."""
        found: Sequence[Group] = getattr(self._groups, self._which)
        return [group for group in found if group.terms.get(self.name)]

    def terms(self, num_rows: int) -> TermTable | None:
        """Return the terms as a GEMM of few rows takes them; None: it cannot, or not all."""
        table = self._table
        if table is None or table.scratch is None or num_rows > MOST_ADAPTED_ROWS:
            return None
        if self.groups():
            return None
        return TermTable(table.groups, table.rows, self._number, table.scratch, self._sizes)

    def start(self, x: Tensor, norm: RowNorm | None = None) -> Started:
        """Return what `finish` needs of the rows `x [n, inputs]`, behind a norm if there is one.

        Before the product: kernels do this while its weights are on their way.
        """
        table, fused = self._table, None
        may_fuse = table is not None and not self.is_fixed and not self.groups()
        if may_fuse and isinstance(norm, Norm):
            fused = RmsNorm(norm.weight, norm.eps, norm.plus_one)
        elif norm is not None:
            x = norm(x)
        if table is None:
            return Started(x, None)
        given = table.groups, table.rows, self._number, table.width
        return Started(x, shrink(x, *given, fused, self.is_fixed))

    def finish(self, y: Tensor, started: Started) -> None:
        """Add the terms to `y [n, outputs]`, in place."""
        self._add_groups(y, started.x)
        if (table := self._table) is not None:
            assert started.partial is not None, "started with the same tables"
            given = table.groups, table.rows, started.partial
            expand(y, *given, self._number, self._sizes)

    def finish_gated(self, y: Tensor, started: Started, gate: str) -> Tensor:
        """Add the terms to `y [n, outputs]` and return it behind a gate."""
        table, groups = self._table, self.groups()
        if table is None or gate not in GATES:
            self.finish(y, started)
            return activate(gate, y)
        assert started.partial is not None, "started with the same tables"
        self._add_groups(y, started.x)
        apart = activate(gate, y) if groups else None  # as it is without tables
        given = table.groups, table.rows, started.partial, self._number, self._sizes
        out = expand_gated(y, *given, gate)
        for group in groups:
            assert apart is not None, "there are groups"
            out[group.rows] = apart[group.rows]
        return out

    def put(self, out: Operand, values: Tensor) -> None:
        """Replace the rows of `out` that have adapters by those of `values`."""
        for group in self.groups():
            _put(out, group.rows, values)
        if (table := self._table) is None:
            return
        mask = table.marks[:, None] != 0
        if isinstance(out, Tensor):
            out.copy_(torch.where(mask, values, out))
            return
        quantized = eight_bits.quantize(values, out.values.dtype)
        ours, theirs = (x.values.view(torch.uint8) for x in (out, quantized))
        ours.copy_(torch.where(mask, theirs, ours))
        out.scales.copy_(torch.where(mask[:, 0], quantized.scales, out.scales))

    def _add_groups(self, y: Tensor, x: Tensor) -> None:
        """Add the terms of groups, one after another."""
        for group in self.groups():
            for term in group.terms[self.name]:
                if term.a is None:
                    here = slice(term.first, term.first + len(term.b))
                    whole = times(x[group.rows], term.b, self.is_fixed)
                    y[group.rows, here] = whole.to(y.dtype)
                    continue
                if term.gain is not None:
                    self._add_gain(y, x, group.rows, term)
                add(y, x, group.rows, term.a, term.b, term.first, self.is_fixed)

    def _add_gain(self, y: Tensor, x: Tensor, rows: Tensor, term: Term) -> None:
        """Add what the layer's product, without its bias, gains by magnitudes."""
        assert term.gain is not None, "checked"
        here = slice(term.first, term.first + len(term.gain))
        product = self._linear.product_of(x[rows])[:, here]
        y[rows, here] = (y[rows, here].float() + product.float() * term.gain).to(y.dtype)


class AdaptedNormLinear(NormLinear):
    """A linear layer of a norm.

    Args:
        place: what it is without adapters.
        finished: the same, which leaves no scales to its reader.
        delta: what is added.
    """

    def __init__(self, place: NormLinear, finished: NormLinear, delta: Delta) -> None:
        super().__init__(place.linear, place.leaves_scales)
        self.without_terms, self._finished, self._delta = place, finished, delta

    def __call__(self, norm: RowNorm, residual: Residual) -> tuple[Tensor, Scales | None]:
        """Compute what `NormLinear` computes, with the terms."""
        if not self._delta.is_active:
            return self.without_terms(norm, residual)
        if (terms := self._delta.terms(len(residual))) is not None:
            whole = self._finished.adapted(norm, residual, terms)
            if whole is not None:
                return whole, None
        y, started = _multiplied(self._finished, norm, residual, self._delta)
        self._delta.finish(y, started)
        return y, None


def _multiplied(
    place: NormLinear, norm: RowNorm, residual: Residual, delta: Delta
) -> tuple[Tensor, Started]:
    """Return what a place makes, and what its terms were started with. One kernel computes a norm
    for both.
    """
    if place.norms_apart(norm, residual):
        norm, residual = identity, Residual(norm(residual.values))
    started = delta.start(residual.values, norm)
    y, scales = place(norm, residual)
    assert scales is None, "what a term is added to is complete"
    return y, started


class AdaptedLinear(Linear):
    """A linear layer that is in no place.

    Args:
        linear: what it is without adapters.
        delta: what is added.
    """

    def __init__(self, linear: Linear, delta: Delta) -> None:
        super().__init__(linear.scheme, linear.weights, linear.bias, linear.is_sliced)
        assert linear.ranks is None, "a sum over ranks comes behind the terms"
        self.stacked = linear.stacked
        self.without_terms, self._delta = linear, delta

    def __call__(self, x: Tensor) -> Tensor:
        """Compute what `Linear` computes, with the terms."""
        if not self._delta.is_active:
            return super().__call__(x)
        started = self._delta.start(x)
        y = super().__call__(x)
        self._delta.finish(y, started)
        return y


class AdaptedGatedLinear(GatedLinear):
    """A linear layer of a norm, before a gate.

    Args:
        place: what it is without adapters.
        product: its product alone.
        delta: what is added to it.
    """

    def __init__(self, place: GatedLinear, product: NormLinear, delta: Delta) -> None:
        super().__init__(place.linear, place.gate)
        self.without_terms, self._product, self._delta = place, product, delta

    def __call__(self, norm: RowNorm, residual: Residual) -> Operand:
        """Compute what `GatedLinear` computes, with the terms."""
        if not self._delta.is_active:
            return self.without_terms(norm, residual)
        if (terms := self._delta.terms(len(residual))) is not None:
            whole = self.without_terms.adapted(norm, residual, terms)
            if whole is not None:
                return whole
        y, started = _multiplied(self._product, norm, residual, self._delta)
        gated = self._delta.finish_gated(y, started, self.gate)
        if not self._delta.is_fixed:
            return gated
        # A fused gate may round otherwise: rows without a term keep what they have beside others.
        out = self.without_terms(norm, residual)
        self._delta.put(out, gated)
        return out


def _put(out: Operand, rows: Tensor, values: Tensor) -> None:
    """Replace rows of `out` by those of `values`."""
    if isinstance(out, Tensor):
        out[rows] = values[rows]
        return
    quantized = eight_bits.quantize(values[rows], out.values.dtype)
    out.values[rows] = quantized.values
    out.scales[rows] = quantized.scales


class AdaptedLinearAdd(LinearAdd):
    """A linear layer that is added to a sum.

    Args:
        place: what it is without adapters; no norm stands behind it.
        delta: what is added to the sum.
    """

    def __init__(self, place: LinearAdd, delta: Delta) -> None:
        super().__init__(place.linear)
        assert place.norm is None, "a norm is of the product and its terms"
        self.without_terms, self._delta = place, delta

    def __call__(self, x: Operand, residual: Residual) -> None:
        """Add what `LinearAdd` adds, with the terms."""
        if not self._delta.is_active:
            self.without_terms(x, residual)
            return
        if self.linear.ranks is not None:
            self.add_part(x, residual)
            return
        terms = self._delta.terms(len(residual))
        if terms is not None and self.without_terms.adapted(x, residual, terms):
            return
        started = self._delta.start(_plain(x, residual.dtype))
        self.without_terms(x, residual)
        self._delta.finish(residual.values, started)

    def part(self, x: Operand, before: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what `LinearAdd` returns, with the rank's part of the terms."""
        if not self._delta.is_active:
            return self.without_terms.part(x, before, dtype)
        started = self._delta.start(_plain(x, dtype))
        y = self.without_terms.part(x, before, dtype)
        self._delta.finish(y, started)
        return y


def _plain(x: Operand, dtype: torch.dtype) -> Tensor:
    """Return rows that were quantised for a product as numbers."""
    if isinstance(x, Quantized):
        return (x.values.float() * x.scales[:, None]).to(dtype)
    assert isinstance(x, Tensor)
    return x
