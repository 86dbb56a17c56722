"""Edit logits by rules that the host can evaluate: bias, bad words, minimum length.

A step is scheduled while the step before is still sampling, so an edit must not depend on the last
token. Bias and bad words of one token never change; a minimum length depends on the number of the
next output only. A bad word of several tokens bans its last token wherever prompt and output end in
its other tokens; a sequence with such a word `needs_every_token` before its next step. Penalties
are not edits: the device counts tokens itself (`kernels/sampling/sample.py`).
"""

from collections.abc import Iterator, Sequence
from math import inf
from struct import Struct

from slipstream_contract.sampling import SamplingParams

EDIT = Struct("<if")  # token id, addend of its logit


def needs_edits(sampling: SamplingParams) -> bool:
    """Return whether these parameters can edit a logit at all."""
    return bool(sampling.bias or sampling.bad_words or (sampling.min_tokens and _ends(sampling)))


def counts_tokens(sampling: SamplingParams) -> bool:
    """Return whether the penalties depend on how often each token occurred."""
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
    """The edits of one sequence, for any output number. A ban is an addend of -inf."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._min_tokens = sampling.min_tokens
        self._addends: dict[int, float] = {}  # at every output
        for token_id, weight in sampling.bias:
            self._addends[token_id] = self._addends.get(token_id, 0.0) + weight
        self._addends |= {word[0]: -inf for word in sampling.bad_words if len(word) == 1}
        self._heads: dict[int, list[tuple[int, ...]]] = {}  # bad words by their last token but one
        for word in sampling.bad_words:
            if len(word) > 1:
                self._heads.setdefault(word[-2], []).append(word)
        # Number of last tokens that the edits depend on.
        self.num_seen = max(0, *(len(word) - 1 for word in sampling.bad_words), 0)
        self._early = self._addends | dict.fromkeys(_ends(sampling), -inf)
        self._packed = _pack(self._addends)
        self._packed_early = _pack(self._early) if self._min_tokens else b""

    @property
    def needs_every_token(self) -> bool:
        """Whether the next edits depend on the last token, and not only on the number of tokens."""
        return self.num_seen > 0

    def pack(self, num_outputs: int, token_ids: Sequence[int] = ()) -> bytes:
        """Return the `EDIT` records of an output, by rising token id, each id at most once.

        Args:
            num_outputs: number of that output, from 0.
            token_ids: at least the last `num_seen` tokens of prompt and output, or all if fewer.
        """
        is_early = num_outputs < self._min_tokens
        banned = dict.fromkeys(self._bans(token_ids), -inf) if self._heads else None
        if banned:
            return _pack((self._early if is_early else self._addends) | banned)
        return self._packed_early if is_early else self._packed

    def _bans(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Yield the last token of every bad word whose other tokens end `token_ids`."""
        for word in self._heads.get(token_ids[-1], ()):
            head = word[:-1]
            if tuple(token_ids[-len(head) :]) == head:
                yield word[-1]
