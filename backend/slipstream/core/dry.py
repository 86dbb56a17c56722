"""Make it unlikely that a repeat goes on: DRY ("don't repeat yourself", P. E. Wiesemann, 2024).

A token that would make a repeat of m tokens longer, m >= `allowed`, loses `multiplier * base **
(m - allowed)` of its logit. Repeats are looked for in the last tokens of prompt and output, the
window:

    window   ... a b c X ... a b c     X would go on with a repeat of 3
    breaks   a token in which a breaker ends (a newline, say) is of no repeat, and loses nothing

For each place of the window that holds the last token, the length of the repeat that ends there is
kept: that of the place before it, one token ago, and one more. So a step costs as much as the
window has places with the last token. A token in which a breaker ends is a number of its own, which
no other place has.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
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
        self._read = array("i")  # these outputs, as they came
        self._states = array("I", [0])  # of the breakers: before each token, and after the last
        self._is_forked = False
        for token_id in prompt[max(0, len(prompt) - self._window) :]:
            self._append(token_id)
        self._num_prompt = len(self._text)
        self._shared = _places_of(self._text, 0)  # of each token in the prompt, by rising place
        self._places: dict[int, list[int]] = {}  # and in the outputs
        self._lengths = repeats(self._text)  # place -> length of the repeat that ends there

    def sibling(self) -> "Dry":
        """Return the rule of another sequence of the same request; neither has read outputs."""
        other = copy(self)
        other._text, other._states, other._places = self._text[:], self._states[:], {}
        other._read = array("i")
        return other

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return the penalties of the token after outputs and drafts."""
        if self._is_forked:
            self._is_forked = False
            self._unread(outputs)
        for token_id in outputs[len(self._text) - self._num_prompt :]:
            self._take(token_id)
        text, lengths = self._with(drafts) if drafts else (self._text, self._lengths)
        start, allowed = max(0, len(text) - self._window), self._penalty.allowed
        longest: dict[int, int] = {}
        for place, found in lengths.items():
            if found < allowed:
                continue
            length = min(found, place - start + 1)  # what is before the window does not count
            token_id = text[place + 1]
            if length >= allowed and token_id >= 0 and length > longest.get(token_id, 0):
                longest[token_id] = length
        return {token_id: -self._penalty.of(length) for token_id, length in longest.items()}

    def fork(self) -> None:
        """Note that the next outputs may be others."""
        self._is_forked = True

    def _append(self, token_id: int) -> None:
        state, number = self._number(self._states[-1], token_id, len(self._text))
        self._states.append(state)
        self._text.append(number)

    def _number(self, state: int, token_id: int, place: int) -> tuple[int, int]:
        """Return the breakers' state after a token, and its number: one of its own in a break."""
        is_break, breakers = False, self._breakers
        if self._vocab is not None and breakers.words:
            for byte in self._vocab.raw(token_id):
                state = breakers.advance(state, byte)
                is_break |= breakers.matched(state) is not None
        return state, -1 - place if is_break else token_id

    def _take(self, token_id: int) -> None:
        """Read one more token."""
        self._append(token_id)
        self._read.append(token_id)
        place = len(self._text) - 1
        number = self._text[place]
        self._lengths = self._extended(self._lengths, number, place)
        places, start = self._places.setdefault(number, []), place - self._window
        if places and places[0] < start - self._window:  # rarely, so that it costs nothing
            del places[: bisect_left(places, start)]
        places.append(place)

    def _extended(self, lengths: Mapping[int, int], number: int, end: int) -> dict[int, int]:
        """Return the lengths of repeats once `number` follows the first `end` tokens."""
        start, before, found = max(0, end + 1 - self._window), lengths.get, dict[int, int]()
        for places in (self._shared.get(number), self._places.get(number)):
            if places:
                near = places[bisect_left(places, start) :]
                found |= {place: before(place - 1, 0) + 1 for place in near}
        return found

    def _with(self, drafts: Sequence[int]) -> tuple["array[int]", dict[int, int]]:
        """Return text and lengths once drafts follow, both of them new."""
        text, lengths, state = self._text[:], self._lengths, self._states[-1]
        num_known = len(text)
        for token_id in drafts:
            end, before = len(text), lengths
            state, number = self._number(state, token_id, end)
            lengths = self._extended(before, number, end)
            for place in range(num_known, end):
                if text[place] == number:
                    lengths[place] = before.get(place - 1, 0) + 1
            text.append(number)
        return text, lengths

    def _unread(self, outputs: Sequence[int]) -> None:
        """Take back what was read and is not in `outputs`."""
        num_same = num_common(self._read, outputs)
        if num_same == len(self._read):
            return
        del self._read[num_same:]
        num_same += self._num_prompt
        del self._text[num_same:], self._states[num_same + 1 :]
        first = max(self._num_prompt, num_same - self._window)
        self._places = _places_of(self._text, first)
        self._lengths = repeats(self._text, max(0, num_same - self._window))


def _places_of(text: "array[int]", first: int) -> dict[int, list[int]]:
    """Return the places of each number of a text, from `first` on."""
    places: dict[int, list[int]] = {}
    for place in range(first, len(text)):
        places.setdefault(text[place], []).append(place)
    return places


def repeats(text: "array[int]", first: int = 0) -> dict[int, int]:
    """Return how many tokens before each place are those before the end, its own included.

    Of places from `first` on; those with none are left out. By the Z function of the text turned
    round: O(n).
    """
    turned = text[first:][::-1]
    size, last = len(turned), len(text) - 1
    found: dict[int, int] = {}
    lengths = [0] * size
    left = right = 0  # turned[left:right] begins as the whole does, the furthest such part
    for i in range(1, size):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < size and turned[length] == turned[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        lengths[i] = length
        if length:
            found[last - i] = length
    return found
