"""Matrices of heads of latent attention, to which adapters add low-rank terms."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.lora.add import INPUTS
from slipstream.layers.adapted import Group, StepGroups, Term
from slipstream.layers.sliced import ROWS, sliced


class AdaptedHeads:
    """Matrices of heads on one side of latent attention: `[n, heads, a] -> [n, heads, b]`.

    Those of both sides are of one layer, `kv_b_proj`, whose term has rows for keys, then for
    values, of each head. What makes keys of latents multiplies queries, so its term does:
    `q B_h A`. What makes values multiplies results: `x A^T B_h^T`. A sequence's latents are of its
    own adapter.

    Args:
        own: what it is without adapters.
        name: of the layer.
        groups: of the step.
        which: the field of `groups` whose rows it sees.
        rows: of each head's keys, and of its values.
        of_keys: whether it is that of keys.
        is_fixed: whether a row's bits may not depend on how many rows there are.
    """

    def __init__(
        self,
        own: Callable[[Tensor], Tensor],
        name: str,
        groups: StepGroups,
        which: str,
        rows: tuple[int, int],
        of_keys: bool,
        is_fixed: bool,
    ) -> None:
        self.without_terms, self._name = own, name
        self._groups, self._which = groups, which
        self._rows, self._of_keys, self._is_fixed = rows, of_keys, is_fixed

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, with the terms."""
        y = self.without_terms(x)
        found: Sequence[Group] = getattr(self._groups, self._which)
        for group in found:
            for term in group.terms.get(self._name, ()):
                change = self._term(x[group.rows], term)
                y[group.rows] = (y[group.rows].float() + change).to(y.dtype)
        return y

    def _term(self, x: Tensor, term: Term) -> Tensor:
        assert term.a is not None, "whole matrices are of head and embedding"
        a = term.a.float()
        b = term.b.float().view(-1, sum(self._rows), term.b.shape[1])
        keys, values = torch.split(b, list(self._rows), 1)
        first, second = (keys, a) if self._of_keys else (a.t(), values.transpose(1, 2))
        x, count = x.float(), len(x)
        if not self._is_fixed:
            return _times(x, first, second)
        of_x, of_t = (-size % INPUTS for size in first.shape[-2:])
        first = functional.pad(first, (0, of_t, 0, of_x)).contiguous()
        second = functional.pad(second, (0, 0, 0, of_t)).contiguous()
        padded = functional.pad(x, (0, of_x, 0, 0, 0, -count % ROWS))
        return sliced(lambda rows: _times(rows, first, second))(padded)[:count]


def _times(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return rows `x [n, heads, a]` times `first [a, r]` and `second [r, b]`, of all heads or
    `[heads, ...]`: `[n, heads, b]`.
    """
    return (x.transpose(0, 1) @ first @ second).transpose(0, 1)
