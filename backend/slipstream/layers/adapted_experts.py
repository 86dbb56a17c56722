"""Terms that adapters add to routed experts: to outputs of pairs of rows and experts that have one.

What the terms change is added to what the grouped GEMMs made, so pairs whose terms are zero keep
their bits, as all others do.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from slipstream.kernels.experts.grouped import gated
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.lora.add import times
from slipstream.layers.adapted import Group, StepGroups, Term
from slipstream.layers.experts import Experts

GATE_UP, DOWN = "experts.gate_up", "experts.down"  # ends of places' names


class ExpertTerms:
    """What adapters make of the outputs of a layer's experts.

    The places are `PREFIX.experts.gate_up`, whose outputs are gate and up of expert 0, then those
    of expert 1, and so on, and `PREFIX.experts.down`.

    Args:
        layer: the experts.
        prefix: of the layer, by the decoder's names.
        groups: of the step.
        which: the field of `groups` whose rows the layer sees.
    """

    def __init__(self, layer: Experts, prefix: str, groups: StepGroups, which: str) -> None:
        self._layer = layer
        self._places = f"{prefix}.{GATE_UP}", f"{prefix}.{DOWN}"
        self._groups, self._which = groups, which

    @property
    def _found(self) -> Sequence[Group]:
        found: Sequence[Group] = getattr(self._groups, self._which)
        return found

    @property
    def in_step(self) -> bool:
        """Whether an adapter of the step that runs has terms for the layer's experts."""
        return any(group.terms.get(place) for group in self._found for place in self._places)

    def __call__(self, x: Tensor, routed: Routed, products: Tensor) -> None:
        """Change the experts' outputs, `[n * k, hidden]`, of rows `x [n, hidden]`, in place."""
        pairs = products.view(len(x), routed.top_k, products.shape[-1])
        for group in self._found:
            ups, downs = (group.terms.get(place, ()) for place in self._places)
            if not ups and not downs:
                continue
            chosen = routed.experts[group.rows]
            for expert in sorted(set(chosen.flatten().tolist())):
                of_up = _terms_of(expert, ups, self._layer.gate_up.outputs)
                of_down = _terms_of(expert, downs, self._layer.down.outputs)
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


def _terms_of(expert: int, terms: Sequence[Term], count: int) -> list[Term]:
    """Return what terms of all experts have of one, by its own `count` outputs."""
    begin, end = expert * count, (expert + 1) * count
    found = []
    for term in terms:
        assert term.a is not None, "whole matrices are of head and embedding"
        if term.a.ndim == 3:
            place = expert - term.first // count
            if 0 <= place < len(term.a):
                found.append(Term(0, term.a[place], term.b[place]))
            continue
        first, last = max(begin, term.first), min(end, term.first + len(term.b))
        if first < last:
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
