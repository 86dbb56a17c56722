"""Adapters with magnitudes, whose rows' lengths several ranks find together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.fuse.adapt import AdaptedPlace
from slipstream.layers.adapted import Term
from slipstream.layers.magnitudes import Kind, folded, squares
from slipstream.models.adapters.blocks import are_finite
from slipstream.models.adapters.read import AdapterWeights, PlaceTerms
from slipstream.runner.group import Group


class Fold:
    """Folds the magnitudes of adapters, on all ranks at the same time.

    Args:
        places: of the layers that are here.
        kind: of the model's rows.
        ranks: the others.
        own_name: returns a place's name, as the whole model has it, as it is here.
    """

    def __init__(
        self,
        places: Sequence[AdaptedPlace],
        kind: Kind,
        ranks: Group,
        own_name: Callable[[str], str],
    ) -> None:
        self._linears = {place.name: place.linear for place in places if place.linear is not None}
        self._kind, self._ranks, self._own_name = kind, ranks, own_name

    @torch.inference_mode()
    def __call__(self, weights: AdapterWeights) -> PlaceTerms | None:
        """Return the rank's terms; None: on some rank they have numbers that are not finite."""
        sums: dict[tuple[str, int], Tensor] = {}
        for name, terms in weights.terms.items():
            for term in terms:
                if term.gain is not None and term.a is not None:
                    linear = self._linears[self._own_name(name)]
                    own = squares(linear, term.first, term.a, term.b, self._kind)
                    sums[name, term.first] = own
        self._add_others([total for key, total in sums.items() if key[0] in weights.of_inputs])
        made = {
            name: tuple(self._folded(term, sums.get((name, term.first))) for term in terms)
            for name, terms in weights.terms.items()
        }
        tensors = [x for terms in made.values() for term in terms for x in (term.b, term.gain)]
        is_finite = all(x is None or are_finite(x) for x in tensors)
        return made if self._ranks.agree(int(is_finite)) else None

    def _add_others(self, parts: Sequence[Tensor]) -> None:
        """Add what other ranks have of these sums, in place."""
        if not parts:
            return
        whole = self._ranks.sum(torch.cat(list(parts)).float().to(self._kind.device)).cpu()
        begin = 0
        for part in parts:
            part.copy_(whole[begin : begin + len(part)])
            begin += len(part)

    def _folded(self, term: Term, total: Tensor | None) -> Term:
        if total is None or term.gain is None:
            return term
        b, gain = folded(term.b, term.gain, total)
        return Term(term.first, term.a, b.to(self._kind.dtype), gain)
