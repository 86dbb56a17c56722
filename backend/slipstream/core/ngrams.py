"""Ban tokens that would repeat n tokens in a row of prompt and output (Paulus et al., 2017).

An index holds, for each n - 1 tokens in a row, the tokens that followed them. That of the prompt is
made once for all sequences of a request; each has its own of what follows the prompt's last tokens.
A step costs O(n), and what it bans, however long the text is.
"""

from array import array
from collections.abc import Mapping, Sequence
from math import inf

from slipstream_contract.ids import TokenIds

from slipstream.core.rules import num_common

_ID_BYTES = 4


class PromptNgrams:
    """What follows each `size - 1` tokens of a prompt, as far as it is read."""

    def __init__(self, size: int, prompt: TokenIds) -> None:
        self.size = size
        self.prompt = prompt
        self._num_read = size - 1  # the first token that has so many before it
        self._next: dict[bytes, int | set[int]] = {}

    def read(self, end: int) -> None:
        """Read the first `end` tokens, or all if there are fewer."""
        end, num_before = min(end, len(self.prompt)), self.size - 1
        if end <= self._num_read:
            return
        first = self._num_read - num_before
        packed = self.prompt[first:end].tobytes()
        found, size = self._next, num_before * _ID_BYTES
        for start, token_id in enumerate(self.prompt[self._num_read : end]):
            at = start * _ID_BYTES
            before = packed[at : at + size]
            known = found.setdefault(before, token_id)
            if isinstance(known, set):
                known.add(token_id)
            elif known != token_id:
                found[before] = {known, token_id}
        self._num_read = end

    def after(self, before: bytes) -> set[int]:
        """Return the tokens that follow `size - 1` packed tokens anywhere in the prompt."""
        self.read(len(self.prompt))
        known = self._next.get(before)
        if known is None:
            return set()
        return known if isinstance(known, set) else {known}


class NoRepeat:
    """The rule of one sequence."""

    field = "no_repeat_ngram_size"

    def __init__(self, ngrams: PromptNgrams) -> None:
        self._ngrams = ngrams
        self._num_before = ngrams.size - 1
        # The prompt's last tokens, then the outputs that are read.
        self._text = ngrams.prompt[max(0, len(ngrams.prompt) - self._num_before) :]
        self._first = len(self._text)
        self._next: dict[bytes, list[int]] = {}
        self._is_forked = False

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return the bans of the token after outputs and drafts."""
        self._follow(outputs)
        text, num_before = self._text, self._num_before
        tail = text[max(0, len(text) - num_before) :]
        num_known = len(tail)
        tail.extend(drafts)
        if len(tail) < num_before:
            return {}
        before = _before(tail, len(tail), num_before)
        banned = self._ngrams.after(before).union(self._next.get(before, ()))
        for place in range(max(num_known, num_before), len(tail)):
            if _before(tail, place, num_before) == before:
                banned.add(tail[place])
        return dict.fromkeys(banned, -inf)

    def fork(self) -> None:
        """Note that the next outputs may be others."""
        self._is_forked = True

    def _follow(self, outputs: Sequence[int]) -> None:
        """Read the outputs that are new."""
        text, first, num_before = self._text, self._first, self._num_before
        if self._is_forked:
            self._is_forked = False
            self._unread(outputs)
        for token_id in outputs[len(text) - first :]:
            if len(text) >= num_before:
                before = _before(text, len(text), num_before)
                self._next.setdefault(before, []).append(token_id)
            text.append(token_id)

    def _unread(self, outputs: Sequence[int]) -> None:
        """Take back what was read and is not in `outputs`."""
        text, first, num_before = self._text, self._first, self._num_before
        num_same = num_common(text[first:], outputs)
        while len(text) > first + num_same:
            text.pop()
            if len(text) >= num_before:
                self._next[_before(text, len(text), num_before)].pop()


def _before(text: "array[int]", place: int, count: int) -> bytes:
    """Return the `count` tokens before a place, packed."""
    return text[place - count : place].tobytes()
