"""Texts, and where each run of `NGRAM` tokens occurs in them, the last occurrence first.

An index maps a run to its last occurrence, and each occurrence to the one before it: a token costs
a few entries of an array, and one of a dictionary where the run is new. Removing a text leaves no
entry of it, so that memory is bounded by the tokens of all texts; occurrences before a removed one
are no longer found, as texts are removed in the order in which they came.
"""

from array import array
from collections.abc import Iterator

NGRAM = 3
_BITS = 21  # of a token id
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1


class Text:
    """Tokens, of which the first `num_indexed` are found."""

    __slots__ = ("_before", "number", "token_ids")

    def __init__(self, number: int, token_ids: "array[int] | None" = None) -> None:
        self.number = number
        self.token_ids = array("i") if token_ids is None else token_ids
        # For each run its occurrence before, by the place behind it less `NGRAM`; -1: none.
        self._before = array("q")

    @property
    def num_indexed(self) -> int:
        """Number of tokens whose runs are indexed; all, if there are fewer than a run has."""
        num_runs = len(self._before)
        return num_runs + NGRAM - 1 if num_runs else min(NGRAM - 1, len(self.token_ids))

    def key(self, place: int) -> int:
        """Return the number of the run that ends before a place."""
        first, second, third = self.token_ids[place - NGRAM : place]
        return (first << _BITS | second) << _BITS | third


class Corpus:
    """The index of some texts, which differ in their numbers."""

    def __init__(self) -> None:
        """Start without a text."""
        self._texts: dict[int, Text] = {}
        self._last: dict[int, int] = {}  # run -> its last occurrence

    def __bool__(self) -> bool:
        return bool(self._texts)

    @property
    def num_runs(self) -> int:
        """Number of different runs, each of which costs some 150 bytes."""
        return len(self._last)

    def index(self, text: Text, end: int) -> None:
        """Index the tokens of a text before place `end`."""
        self._texts[text.number] = text
        last, before, token_ids = self._last, text._before, text.token_ids
        number, first = text.number << _PLACE_BITS, text.num_indexed + 1
        if end < max(first, NGRAM):
            return
        a, b = token_ids[first - 3], token_ids[first - 2]
        for place in range(first, end + 1):
            c = token_ids[place - 1]
            run = (a << _BITS | b) << _BITS | c
            before.append(last.get(run, -1))
            last[run] = number | place
            a, b = b, c

    def last(self, run: int) -> int:
        """Return the last occurrence of a run, for `occurrences`; -1: none."""
        return self._last.get(run, -1)

    def before(self, text: Text, place: int) -> int:
        """Return the occurrence before that which ends at a place of a text; -1: none."""
        return text._before[place - NGRAM]

    def occurrences(self, last: int, most: int) -> Iterator[tuple[Text, int]]:
        """Yield texts and the places behind a run in them: `last`, and those before it."""
        while last >= 0 and most > 0 and (text := self._texts.get(last >> _PLACE_BITS)):
            place = last & _PLACE
            if place > text.num_indexed:
                return  # it is being removed
            yield text, place
            last = text._before[place - NGRAM]
            most -= 1

    def remove(self, text: Text, most: int) -> int:
        """Remove the last `most` tokens of a text; return how many there were.

        The text is gone with its first token.
        """
        token_ids, before, last = text.token_ids, text._before, self._last
        count = min(most, len(token_ids))
        for place in range(len(token_ids), len(token_ids) - count, -1):
            if place - NGRAM < len(before) and place >= NGRAM:
                run, previous = text.key(place), before.pop()
                if last[run] == text.number << _PLACE_BITS | place:
                    if previous >= 0 and previous >> _PLACE_BITS in self._texts:
                        last[run] = previous
                    else:
                        del last[run]
        del token_ids[len(token_ids) - count :]
        if not token_ids:
            self._texts.pop(text.number, None)
        return count
