"""Edits of logits that the host knows beforehand: bias, bad words, minimum length.

A step is scheduled while the one before still draws, so an edit must not hang on the last token.
Bias and bad words of one token never change, and a minimum length asks only for the number of the
next output. A bad word of several tokens bans its last one where prompt and output end in all the
others: such a sequence `needs_every_token`. Penalties are no edits: the device counts tokens
itself (`kernels/sampling/sample.py`).
"""

from collections.abc import Iterator, Sequence
from math import inf
from struct import Struct

from slipstream_contract.sampling import SamplingParams

EDIT = Struct("<if")  # token id, what is added to its logit


def needs_edits(sampling: SamplingParams) -> bool:
    """Can these parameters edit a logit at all?"""
    return bool(sampling.bias or sampling.bad_words or (sampling.min_tokens and _ends(sampling)))


def counts_tokens(sampling: SamplingParams) -> bool:
    """Do the penalties ask how often each token occurred?"""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _ends(sampling: SamplingParams) -> tuple[int, ...]:
    return (*sampling.end_ids, *sampling.stop_token_ids)


def _pack(addends: dict[int, float]) -> bytes:
    return b"".join(EDIT.pack(*edit) for edit in sorted(addends.items()))


class Edits:
    """One sequence's edits of any output number; bans are addends of -inf."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._min_tokens = sampling.min_tokens
        self._addends: dict[int, float] = {}  # at every place
        for token_id, weight in sampling.bias:
            self._addends[token_id] = self._addends.get(token_id, 0.0) + weight
        self._addends |= {word[0]: -inf for word in sampling.bad_words if len(word) == 1}
        self._heads: dict[int, list[tuple[int, ...]]] = {}  # bad words by their last token but one
        for word in sampling.bad_words:
            if len(word) > 1:
                self._heads.setdefault(word[-2], []).append(word)
        # How many of the last tokens the edits depend on.
        self.num_seen = max(0, *(len(word) - 1 for word in sampling.bad_words), 0)
        self._early = self._addends | dict.fromkeys(_ends(sampling), -inf)
        self._packed = _pack(self._addends)
        self._packed_early = _pack(self._early) if self._min_tokens else b""

    @property
    def needs_every_token(self) -> bool:
        """Do the next edits depend on the last token, not only on how many there are?"""
        return self.num_seen > 0

    def pack(self, num_outputs: int, token_ids: Sequence[int] = ()) -> bytes:
        """`EDIT` records by rising token id, none twice, for output number `num_outputs`.

        `token_ids`: at least the last `num_seen` of prompt and output, where there are so many.
        """
        is_early = num_outputs < self._min_tokens
        banned = dict.fromkeys(self._bans(token_ids), -inf) if self._heads else None
        if banned:
            return _pack((self._early if is_early else self._addends) | banned)
        return self._packed_early if is_early else self._packed

    def _bans(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Last tokens of the bad words whose other tokens are all there."""
        for word in self._heads.get(token_ids[-1], ()):
            head = word[:-1]
            if tuple(token_ids[-len(head) :]) == head:
                yield word[-1]
