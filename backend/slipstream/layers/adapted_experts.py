"""Terms that adapters add to routed experts: to what pairs of rows and experts have that have one.

Kernels add those of adapters in tables, of gates and ups before the gate. Those of groups torch
adds, one expert after another, to what the grouped GEMMs made. Pairs whose terms are zero keep
their bits, as all others do.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from slipstream.kernels.experts.grouped import Added, gated
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.lora.add import times
from slipstream.kernels.lora.pairs import group_pairs
from slipstream.kernels.lora.terms import Table, expand, expand_new, shrink
from slipstream.layers.adapted import Group, StepGroups, Term
from slipstream.layers.experts import Experts, Started

GATE_UP, DOWN = "experts.gate_up", "experts.down"  # ends of places' names


class ExpertTerms:
    """What adapters make of a layer's experts.

    The places are `PREFIX.experts.gate_up`, whose outputs are gate and up of expert 0, then those
    of expert 1, and so on, and `PREFIX.experts.down`.

    Args:
        layer: the experts.
        prefix: of the layer, by the decoder's names.
        groups: of the step.
        which: the field of `groups` whose rows the layer sees.
        first: number of expert 0's gate and up in tables; those of all experts follow each other,
            and then their last matrices.
    """

    without_terms = None  # what stands there in steps without adapters

    def __init__(
        self, layer: Experts, prefix: str, groups: StepGroups, which: str, first: int = 0
    ) -> None:
        self._layer = layer
        self._places = f"{prefix}.{GATE_UP}", f"{prefix}.{DOWN}"
        self._numbers = first, first + layer.config.routing.num_experts
        self._groups, self._which = groups, which

    @property
    def _found(self) -> Sequence[Group]:
        found: Sequence[Group] = getattr(self._groups, self._which)
        return found

    @property
    def _table(self) -> Table | None:
        table = self._groups.tables.get(self._which)
        return None if table is None or table.experts is None else table

    @property
    def in_step(self) -> bool:
        """Whether an adapter of the step that runs has terms for the layer's experts."""
        if self._table is not None:
            return True
        return any(group.terms.get(place) for group in self._found for place in self._places)

    def start(self, x: Tensor, routed: Routed) -> Started:
        """Compute what is added to gates and ups of rows `x [n, hidden]`."""
        step = self._table
        if step is None:
            return Started()
        assert step.experts is not None, "such tables are left out"
        table = group_pairs(routed.experts, routed.order, routed.weights, step.experts)
        number, fixed, size = self._numbers[0], self._layer.is_fixed, self._layer.down.inputs
        given = number, step.width, None, fixed
        t = shrink(x, table.groups, table.rows, *given, are_late=True)
        values = x.new_empty(len(routed.order), 2 * size)
        expand_new(values, table.groups, table.places, t, number, (size, size))
        return Started(table, Added(values, table.marks))

    def finish(
        self, x: Tensor, inner: Tensor, routed: Routed, products: Tensor, started: Started
    ) -> None:
        """Change the experts' outputs, `[n * k, hidden]` of `inner [n * k, i]`, in place."""
        self._add_groups(x, routed, products)
        step, table = self._table, started.table
        if step is None or table is None:
            return
        number, size = self._numbers[1], products.shape[-1]
        given = number, step.width, None, self._layer.is_fixed
        t = shrink(inner, table.groups, table.places, *given, table.factors, are_late=True)
        expand(products, table.groups, routed.order, t, number, (size,), are_late=True)

    def _add_groups(self, x: Tensor, routed: Routed, products: Tensor) -> None:
        """Add the terms of groups, expert by expert, to outputs of rows `x [n, hidden]`."""
        pairs = products.view(len(x), routed.top_k, products.shape[-1])
        for group in self._found:
            ups, downs = (group.terms.get(place, ()) for place in self._places)
            if not ups and not downs:
                continue
            chosen = routed.experts[group.rows]
            all_ups = ByExpert(ups, self._layer.gate_up.outputs)
            all_downs = ByExpert(downs, self._layer.down.outputs)
            for expert in sorted(set(chosen.flatten().tolist())):
                of_up, of_down = all_ups.of(expert), all_downs.of(expert)
                if not of_up and not of_down:
                    continue
                own, column = (chosen == expert).nonzero(as_tuple=True)
                rows = group.rows[own]
                change = self._change(expert, x[rows], of_up, of_down)
                change *= routed.weights[rows, column][:, None]
                own_pairs = pairs[rows, column]
                pairs[rows, column] = (own_pairs.float() + change).to(pairs.dtype)

    def _change(
        self, expert: int, x: Tensor, of_up: Sequence[Term], of_down: Sequence[Term]
    ) -> Tensor:
        """Return what terms add to an expert's outputs of rows, in fp32."""
        layer, fixed, gate = self._layer, self._layer.is_fixed, self._layer.config.gate
        weight, bias = layer.gate_up.of(expert)
        y = times(x, weight, fixed)
        if bias is not None:
            y += bias
        before = inner = gated(y, gate).to(x.dtype)
        change = y.new_zeros(len(x), layer.down.outputs)
        if of_up:
            _add(y, x, of_up, fixed)
            inner = gated(y, gate).to(x.dtype)
            change += times(inner.float() - before.float(), layer.down.of(expert)[0], fixed)
        _add(change, inner, of_down, fixed)
        return change


class ByExpert:
    """The terms of a place of all experts, by expert.

    Args:
        terms: of the place.
        size: outputs of an expert.
    """

    def __init__(self, terms: Sequence[Term], size: int) -> None:
        self._size = size
        self._of_all = [term for term in terms if term.a is not None and term.a.ndim == 3]
        self._of_each: dict[int, list[Term]] = {}
        for term in terms:
            assert term.a is not None, "whole matrices are of head and embedding"
            if term.a.ndim == 3:
                continue
            for expert in range(term.first // size, (term.first + len(term.b) - 1) // size + 1):
                self._of_each.setdefault(expert, []).append(term)

    def of(self, expert: int) -> list[Term]:
        """Return what there is of one, by its own outputs."""
        found = []
        for term in self._of_all:
            assert term.a is not None, "checked"
            place = expert - term.first // self._size
            if 0 <= place < len(term.a):
                found.append(Term(0, term.a[place], term.b[place]))
        begin, end = expert * self._size, (expert + 1) * self._size
        for term in self._of_each.get(expert, ()):
            first, last = max(begin, term.first), min(end, term.first + len(term.b))
            b = term.b[first - term.first : last - term.first]
            found.append(Term(first - begin, term.a, b))
        return found


def _add(y: Tensor, x: Tensor, terms: Sequence[Term], fixed: bool) -> None:
    """Add an expert's terms of rows `x` to `y`, in fp32."""
    for term in terms:
        assert term.a is not None, "whole matrices are of head and embedding"
        here = slice(term.first, term.first + len(term.b))
        y[:, here] += times(times(x, term.a, fixed), term.b, fixed)


def divided(term: Term, most: int) -> Iterator[Term]:
    """Divide a term of several experts by these into pieces of `most` bytes; others are one."""
    if term.a is None or term.a.ndim < 3:
        yield term
        return
    each = max(1, most * len(term.a) // term.num_bytes)
    for begin in range(0, len(term.a), each):
        first = term.first + begin * term.b.shape[1]
        yield Term(first, term.a[begin : begin + each], term.b[begin : begin + each])
