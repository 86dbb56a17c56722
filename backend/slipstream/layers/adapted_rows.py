"""What adapters add to rows of the embedding, and to keys and values of virtual tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.elementwise.rope import rotate
from slipstream.layers.adapted import Group, KeyRows, StepGroups


def keys_of(layer: int) -> str:
    """Return the name of the term that has a layer's keys and values of virtual tokens."""
    return f"model.layers.{layer}.self_attn.prefix"


class AdaptedRows:
    """What adapters add to rows of the embedding, or put in their place.

    The term's A is `[rows, r]` and its B `[hidden, r]`; without A, its B is `[rows, hidden]`. `own`
    looks up rows without adapters.
    """

    def __init__(self, name: str, groups: StepGroups, own: Callable[[Tensor], Tensor]) -> None:
        self._name, self._groups, self._own = name, groups, own

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows `[n, hidden]` of `token_ids [n] i64` as adapters have them."""
        rows = self._own(token_ids)
        groups = [each for each in self._groups.tokens if each.terms.get(self._name)]
        if not groups:
            return rows
        rows = rows.clone()
        for group in groups:
            ids = token_ids[group.rows]
            for term in group.terms[self._name]:
                if term.a is None:
                    rows[group.rows] = term.b[ids]
                else:
                    change = (term.a[ids].float()[:, None] * term.b.float()).sum(-1)
                    rows[group.rows] = (rows[group.rows].float() + change).to(rows.dtype)
        return rows


class VirtualKeys:
    """Finds the tokens of a step whose keys and values adapters bring: prefix tuning.

    Of id `vocab_size + i` they are row i of the terms of `keys_of`, of all layers that are here.
    """

    def __init__(self, groups: StepGroups, vocab_size: int) -> None:
        self._groups, self._vocab_size = groups, vocab_size

    def __call__(self, token_ids: Tensor) -> None:
        """Have the layers of the step bring keys for virtual ones of `token_ids [n] i64`."""
        for group in self._groups.tokens:
            if keys_of(0) in group.terms:
                places = token_ids[group.rows] - self._vocab_size
                is_own = places >= 0
                keys = KeyRows(group.terms, group.rows[is_own], places[is_own])
                self._groups.key_rows.append(keys)


class VirtualRows:
    """Rows that adapters have for token ids behind the vocabulary: prompt tuning.

    The term has no A, and its B is `[rows, hidden]`: of id `vocab_size + i` it is row i. Of prefix
    tuning the rows are zeros, and what counts are keys and values of `[rows, 2 * kv size]`, a
    layer's in a term named by `keys_of`.
    """

    def __init__(self, name: str, groups: StepGroups, vocab_size: int) -> None:
        self._name, self._groups, self._vocab_size = name, groups, vocab_size
        self._find_keys = VirtualKeys(groups, vocab_size)

    def _found(self) -> list[Group]:
        return [each for each in self._groups.tokens if each.terms.get(self._name)]

    def without(self, token_ids: Tensor) -> Tensor:
        """Return the ids `[n] i64` with 0 in place of virtual ones."""
        if not self._found():
            return token_ids
        return torch.where(token_ids < self._vocab_size, token_ids, 0)

    def __call__(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows `[n, hidden]` of `token_ids [n] i64` with those of virtual tokens."""
        groups = self._found()
        if not groups:
            return rows
        self._find_keys(token_ids)
        rows = rows.clone()
        for group in groups:
            places = token_ids[group.rows] - self._vocab_size
            for term in group.terms[self._name]:
                own = term.b[places.clamp(min=0)]
                rows[group.rows] = torch.where((places >= 0)[:, None], own, rows[group.rows])
        return rows


class AdaptedKeys:
    """Keys and values that adapters bring for virtual tokens (Li and Liang, 2021), of one layer.

    What they bring is what attention sees: keys that no rotation has yet to turn, so they are
    turned back here.

    Args:
        name: of the layer's term.
        groups: of the step.
    """

    without_terms = None  # what stands there in steps without adapters

    def __init__(self, name: str, groups: StepGroups) -> None:
        self._name, self._groups = name, groups

    def put(self, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Replace rows of `k` and `v`, `[n, heads, d]`, in place.

        Args:
            k, v: before their rotation.
            cos_sin: by which k will be rotated, `[_, d] f32`.
            positions: of each token, `[n] i64`: its row of that.
        """
        for each in self._groups.key_rows:
            [term] = each.terms[self._name]
            keys, values = term.b[each.places].view(len(each.rows), 2, *k.shape[1:]).unbind(1)
            cos, sin = cos_sin[positions[each.rows]].unsqueeze(1).chunk(2, dim=-1)
            length = cos.square() + sin.square()  # not 1 where the rotation also scales
            k[each.rows] = rotate(keys.float(), cos / length, -sin / length).to(k.dtype)
            v[each.rows] = values
