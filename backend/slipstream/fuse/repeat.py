"""Blocks by the launches of a block before them that is alike.

The host takes some 40 us to choose a kernel, check its tensors and launch it, of which the launch
is 3. Of a step that is no CUDA graph this is done for one block of each kind. Blocks that are alike
(`alike.py`) launch the same kernels with the same arguments, but for the addresses of their weights
and their cache. So all others launch again what that one did (`recording.py`). Nothing is kept from
one step to the next.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from slipstream.fuse.alike import form_of
from slipstream.fuse.recording import Own, Recording, State, layout_of, record, state_of
from slipstream.layers.attention import AttentionInputs
from slipstream.layers.decoder import AnyBlock, one_by_one
from slipstream.layers.residual import Residual

# Of a step whose blocks are repeated. More take the device far longer than the host, and what a
# block allocates is most of a step's memory: all of it at once is a third more than piece by piece.
MOST_TOKENS = 4096


class _Kind(NamedTuple):
    """Blocks that launch the same, but for their own tensors."""

    form: int  # of the decoder's
    inputs: int  # identity
    cache: object  # how it lies in memory


class Repeating:
    """Applies the blocks of a decoder; of many tokens, or not on the device, `one_by_one`."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._blocks: Sequence[AnyBlock] = ()
        self._own: list[tuple[int, Own] | None] = []

    def __call__(
        self,
        blocks: Sequence[AnyBlock],
        residual: Residual,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[Tensor],
    ) -> None:
        """Do what `one_by_one` does: the same kernels with the same arguments in the same order."""
        is_taken = residual.device.type == self._device and len(residual) <= MOST_TOKENS
        if not is_taken:
            one_by_one(blocks, residual, inputs, caches)
            return
        owns = self._owns_of(blocks)
        kinds = [
            None if own is None else _Kind(own[0], id(where), layout_of(cache))
            for own, where, cache in zip(owns, inputs, caches, strict=True)
        ]
        left = Counter(kinds)
        tried: dict[tuple[_Kind | None, object], Recording | None] = {}
        known: State | None = None  # what a recording left
        for i, (block, where, cache) in enumerate(zip(blocks, inputs, caches, strict=True)):
            own, kind, state = owns[i], kinds[i], known or state_of(residual)
            known = None
            left[kind] -= 1
            key = kind, state and state.layouts
            if own is None or state is None:
                block(residual, where, cache)
            elif (recording := tried.get(key)) is not None:
                known = recording.repeat(own[1], cache, state, residual)
            elif left[kind] and key not in tried:
                tried[key] = record(block, own[1], state, residual, where, cache)
            else:
                block(residual, where, cache)
            if not left[kind]:  # what its recordings keep is free then
                tried = {key: each for key, each in tried.items() if key[0] != kind}

    def _owns_of(self, blocks: Sequence[AnyBlock]) -> list[tuple[int, Own] | None]:
        """Return the number of each block's form, and its own tensors; None: it is not known.

        They are looked up once: blocks stay what they are from the first step on.
        """
        if blocks is not self._blocks:
            numbers: dict[object, int] = {}
            forms = [form_of(block) for block in blocks]
            self._own = [
                form and (numbers.setdefault(form.parts, len(numbers)), Own.of(form.tensors))
                for form in forms
            ]
            self._blocks = blocks
        return self._own
