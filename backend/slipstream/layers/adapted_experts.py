"""Terms that adapters add to routed experts: pairs of rows and experts that have one are made anew.

All other pairs keep what the grouped GEMMs made.
"""

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.experts.grouped import ExpertMatrix, gated
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
                of_up = _terms_of(expert, ups, self._layer.gate_up)
                of_down = _terms_of(expert, downs, self._layer.down)
                if not of_up and not of_down:
                    continue
                own, column = (chosen == expert).nonzero(as_tuple=True)
                rows = group.rows[own]
                y = self._outputs(expert, x[rows], of_up, of_down)
                weights = routed.weights[rows, column][:, None]
                pairs[rows, column] = (y * weights).to(pairs.dtype)

    def _outputs(
        self, expert: int, x: Tensor, of_up: Sequence[Term], of_down: Sequence[Term]
    ) -> Tensor:
        """Return an expert's outputs of rows, in fp32."""
        layer, fixed = self._layer, self._layer.is_fixed
        inner = gated(_product(x, layer.gate_up, expert, of_up, fixed), layer.config.gate)
        return _product(inner.to(x.dtype), layer.down, expert, of_down, fixed)


def _terms_of(expert: int, terms: Sequence[Term], matrix: ExpertMatrix) -> list[Term]:
    """Return what terms of all experts have of one, by its own outputs."""
    count = matrix.outputs
    begin, end = expert * count, (expert + 1) * count
    found = []
    for term in terms:
        first, last = max(begin, term.first), min(end, term.first + len(term.b))
        if first < last:
            b = term.b[first - term.first : last - term.first]
            found.append(Term(first - begin, term.a, b))
    return found


def _product(
    x: Tensor, matrix: ExpertMatrix, expert: int, terms: Sequence[Term], fixed: bool
) -> Tensor:
    """Return `x W^T + b` of an expert with terms, in fp32."""
    weight, bias = matrix.of(expert)
    y = times(x, weight, fixed)
    if bias is not None:
        y = y + bias
    for term in terms:
        assert term.a is not None, "whole matrices are of head and embedding"
        here = slice(term.first, term.first + len(term.b))
        y[:, here] += times(times(x, term.a, fixed), term.b, fixed)
    return y
