"""Make it unlikely that a repeat goes on: DRY ("don't repeat yourself", P. E. Wiesemann, 2024).

A token that would make a repeat of m tokens longer, m >= `allowed`, loses `multiplier * base **
(m - allowed)` of its logit. Repeats are looked for in the last tokens of prompt and output, the
window:

    window   ... a b c X ... a b c     X would go on with a repeat of 3
    breaks   a token in which a breaker ends (a newline, say) is of no repeat, and loses nothing

For each place of the window that holds the last token, the length of the repeat that ends there is
kept: that of the place before it, one token ago, and one more. So a step costs as much as the
window has places with the last token.
"""

from array import array
from collections.abc import Mapping, Sequence
from math import inf, log

from slipstream_contract.ids import TokenIds
from slipstream_contract.limits import MAX_DRY_TOKENS
from slipstream_contract.sampling import SamplingParams

from slipstream.core.rules import num_common
from slipstream.core.stop import RawBytes, stop_words

MOST = 1e9  # that a logit loses: finite, whatever it is multiplied by later


class DryPenalty:
    """How much the logit of a token loses."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.allowed = sampling.dry_allowed_length
        self._base = sampling.dry_base
        self._multiplier = sampling.dry_multiplier
        if sampling.order == "trtllm":  # logit / T - d is (logit - d T) / T
            self._multiplier *= sampling.penalty_temperature
        least = log(MOST) - log(self._multiplier)
        self._most = least / log(self._base) if self._base > 1 else inf

    def of(self, length: int) -> float:
        """Return the penalty of a token that goes on with a repeat of so many tokens."""
        power = length - self.allowed
        return MOST if power > self._most else min(MOST, self._multiplier * self._base**power)


class Dry:
    """The rule of one sequence."""

    field = "dry_multiplier"

    def __init__(self, sampling: SamplingParams, prompt: TokenIds, vocab: RawBytes | None) -> None:
        size = sampling.dry_penalty_last_n
        self._window = MAX_DRY_TOKENS if size < 0 else size
        self._penalty = DryPenalty(sampling)
        self._vocab = vocab
        self._breakers = stop_words(sampling.dry_sequence_breakers)
        self._text = array("i")  # the prompt's last tokens, then the outputs that are read
        self._states = array("I", [0])  # of the breakers: before each token, and after the last
        self._breaks = bytearray()  # 1: a breaker ends in that token
        self._places: dict[int, list[int]] = {}  # of each token, by rising place
        self._lengths: dict[int, int] = {}  # place -> length of the repeat that ends there
        self._is_forked = False
        first = prompt[max(0, len(prompt) - self._window) :]
        self._num_prompt = len(first)
        for token_id in first:
            self._take(token_id)

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return the penalties of the token after outputs and drafts."""
        if self._is_forked:
            self._is_forked = False
            self._unread(outputs)
        for token_id in outputs[len(self._text) - self._num_prompt :]:
            self._take(token_id)
        text, breaks, lengths = self._text, self._breaks, self._lengths
        if drafts:
            text, breaks, lengths = self._with(drafts)
        start, allowed = max(0, len(text) - self._window), self._penalty.allowed
        longest: dict[int, int] = {}
        for place, length in lengths.items():
            length = min(length, place - start + 1)  # what is before the window does not count
            if length >= allowed and not breaks[place + 1]:
                token_id = text[place + 1]
                longest[token_id] = max(length, longest.get(token_id, 0))
        return {token_id: -self._penalty.of(length) for token_id, length in longest.items()}

    def fork(self) -> None:
        """Note that the next outputs may be others."""
        self._is_forked = True

    def _take(self, token_id: int) -> None:
        """Read one more token."""
        state, is_break = self._break(self._states[-1], token_id)
        self._states.append(state)
        self._lengths = self._extended(self._lengths, token_id, is_break, len(self._text))
        self._breaks.append(is_break)
        places, start = self._places.setdefault(token_id, []), len(self._text) - self._window
        if places and places[0] < start - self._window:  # rarely, so that it costs nothing
            places[:] = [place for place in places if place >= start]
        places.append(len(self._text))
        self._text.append(token_id)

    def _break(self, state: int, token_id: int) -> tuple[int, bool]:
        """Return the state of the breakers after a token, and whether one ends in it."""
        is_break, breakers = False, self._breakers
        if self._vocab is not None and breakers.words:
            for byte in self._vocab.raw(token_id):
                state = breakers.advance(state, byte)
                is_break |= breakers.matched(state) is not None
        return state, is_break

    def _extended(
        self, lengths: Mapping[int, int], token_id: int, is_break: bool, end: int
    ) -> dict[int, int]:
        """Return the lengths of repeats once `token_id` follows the first `end` tokens."""
        places = self._places.get(token_id)
        if is_break or places is None:
            return {}
        start = max(0, end + 1 - self._window)
        breaks = self._breaks
        return {
            place: lengths.get(place - 1, 0) + 1
            for place in places
            if place >= start and not breaks[place]
        }

    def _with(self, drafts: Sequence[int]) -> tuple["array[int]", bytearray, dict[int, int]]:
        """Return text, breaks and lengths of the window once drafts follow, all of them new."""
        text, breaks, lengths = self._text[:], self._breaks[:], self._lengths
        state, num_known = self._states[-1], len(self._text)
        for token_id in drafts:
            state, is_break = self._break(state, token_id)
            end, before = len(text), lengths
            lengths = self._extended(before, token_id, is_break, end)
            if not is_break:
                for place in range(num_known, end):
                    if text[place] == token_id and not breaks[place]:
                        lengths[place] = before.get(place - 1, 0) + 1
            text.append(token_id)
            breaks.append(is_break)
        return text, breaks, lengths

    def _unread(self, outputs: Sequence[int]) -> None:
        """Take back what was read and is not in `outputs`."""
        num_same = self._num_prompt + num_common(self._text[self._num_prompt :], outputs)
        if num_same == len(self._text):
            return
        first = max(0, num_same - self._window)
        again = self._text[first:num_same]
        del self._text[first:], self._breaks[first:], self._states[first + 1 :]
        self._places, self._lengths = {}, {}
        for token_id in again:
            self._take(token_id)
