"""From sampling parameters to edits of single logits: penalties, bias, bad words, minimum length.

One edit a token: the repetition penalty is its factor; bias, presence and frequency penalty and
bans add up. The repetition penalty counts prompt and output (Keskar et al., 2019; as transformers
and TensorRT-LLM have it), the other two the output only. A bad word of several tokens bans its last
one where prompt and output end in all the others.
"""

from collections.abc import Iterable, Sequence
from math import inf

from slipstream_contract.sampling import SamplingParams

from slipstream.engine.batch import LogitEdit


def needs_edits(sampling: SamplingParams) -> bool:
    """Can these parameters change a logit at all?"""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.bias
        or sampling.bad_words
        or (sampling.min_tokens and (sampling.end_ids or sampling.stop_token_ids))
    )


def counts_tokens(sampling: SamplingParams) -> bool:
    """Do they depend on how often each token occurred?"""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


class Edits:
    """One sequence's edits, brought up to date by each output token in O(1)."""

    def __init__(self, sampling: SamplingParams, prompt: Iterable[int]) -> None:
        self._sampling = sampling
        self._bias: dict[int, float] = {}
        for token_id, weight in sampling.bias:
            self._bias[token_id] = self._bias.get(token_id, 0.0) + weight
        self._banned = {word[0] for word in sampling.bad_words if len(word) == 1}
        self._heads: dict[int, list[tuple[int, ...]]] = {}  # bad words by their last token but one
        for word in sampling.bad_words:
            if len(word) > 1:
                self._heads.setdefault(word[-2], []).append(word)
        self._ends = (*sampling.end_ids, *sampling.stop_token_ids)
        self._counts: dict[int, int] = {}  # of the output
        self._seen = set(prompt) if sampling.repetition_penalty != 1.0 else set()
        self._edits: dict[int, LogitEdit] = {}
        self._packed: tuple[LogitEdit, ...] | None = None
        for token_id in self._seen | self._bias.keys() | self._banned:
            self._update(token_id)

    @property
    def needs_every_token(self) -> bool:
        """Do the next edits depend on the last token, not only on how many there are?"""
        return bool(self._heads) or counts_tokens(self._sampling)

    def add(self, token_id: int) -> None:
        """One more output token."""
        self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._seen.add(token_id)
        self._update(token_id)

    def _update(self, token_id: int) -> None:
        sampling = self._sampling
        factor = sampling.repetition_penalty if token_id in self._seen else 1.0
        addend = self._bias.get(token_id, 0.0)
        if count := self._counts.get(token_id, 0):
            addend -= sampling.presence_penalty + sampling.frequency_penalty * count
        if token_id in self._banned:
            addend = -inf
        if factor != 1.0 or addend != 0.0:
            self._edits[token_id] = LogitEdit(token_id, factor, addend)
        else:
            self._edits.pop(token_id, None)
        self._packed = None

    def pack(self, token_ids: Sequence[int], num_outputs: int) -> tuple[LogitEdit, ...]:
        """The edits for the token after `token_ids` (prompt and output), at most one a token id."""
        banned = self._bans(token_ids, num_outputs)
        if banned:
            edits = self._edits | {t: LogitEdit(t, 1.0, -inf) for t in banned}
            return tuple(edits.values())
        if self._packed is None:
            self._packed = tuple(self._edits.values())
        return self._packed

    def _bans(self, token_ids: Sequence[int], num_outputs: int) -> list[int]:
        """Tokens banned at this place only."""
        banned = list(self._ends) if num_outputs < self._sampling.min_tokens else []
        for word in self._heads.get(token_ids[-1], ()):
            head = word[:-1]
            if tuple(token_ids[-len(head) :]) == head:
                banned.append(word[-1])
        return banned
