"""Read a text that comes in pieces: what is read never depends on where the pieces end.

The methods that may need more text are generators: they yield where the text read so far does not
decide, and go on when `feed` has brought more, or `is_over` says that nothing follows.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]

SPACES = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")


class Stops:
    """Texts to be found, none of which starts another."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Compile the search for texts, empty ones left out."""
        self.texts = tuple(sorted({text for text in texts if text}))
        for text in self.texts:
            others = [each for each in self.texts if each != text and each.startswith(text)]
            assert not others, f"{text!r} starts {others}"
        self._found = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        starts = {text[:size] for text in self.texts for size in range(1, len(text))}
        ordered = sorted(starts, key=len, reverse=True)
        self._start = re.compile(f"(?:{'|'.join(map(re.escape, ordered)) or '(?!)'})\\Z")
        self._longest = max(map(len, self.texts), default=1) - 1
        self._firsts = {text[0] for text in self.texts}

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Return place and text of the first that is found; without one, the size and ""."""
        found = self._found.search(text, at)
        return (len(text), "") if found is None else (found.start(), found[0])

    def find_start(self, text: str, at: int) -> int:
        """Return where the text ends in what may become one of these; its size if it does not."""
        at = max(at, len(text) - self._longest)
        if self._firsts.isdisjoint(text[at:]):
            return len(text)
        found = self._start.search(text, at)
        return len(text) if found is None else found.start()


class Reader:
    """A text, read from the front."""

    __slots__ = ("_at", "_buffer", "_record", "is_over")

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._record: list[str] | None = None
        self.is_over = False

    def feed(self, text: str) -> None:
        """Add text at the end."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0

    def record(self) -> None:
        """Start to record what is read from here."""
        self._record = []

    def recorded(self) -> str:
        """Return what was read since `record`, and record no more."""
        record, self._record = self._record, None
        return "".join(record or ())

    def take(self, end: int) -> str:
        """Read up to a place in the buffer."""
        piece = self._buffer[self._at : end]
        self._at = end
        if self._record is not None and piece:
            self._record.append(piece)
        return piece

    def skip(self, size: int) -> None:
        """Read characters that are known to be there."""
        self.take(self._at + size)

    def window(self) -> tuple[str, int]:
        """Return the buffer, and where in it reading goes on."""
        return self._buffer, self._at

    def peek(self) -> Step[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._buffer) and not self.is_over:
            yield
        return self._buffer[self._at : self._at + 1]

    def spaces(self) -> Step[str]:
        """Read blanks; return the character behind them without reading it."""
        while True:
            found = _SPACES.match(self._buffer, self._at)
            assert found is not None
            self.take(found.end())
            if self._at < len(self._buffer) or self.is_over:
                return self._buffer[self._at : self._at + 1]
            yield

    def literal(self, text: str) -> Step[bool]:
        """Read a text if it is next; return whether it is."""
        while True:
            there = self._buffer[self._at : self._at + len(text)]
            if there == text:
                self.skip(len(text))
                return bool(text)
            if self.is_over or not text.startswith(there):
                return False
            yield

    def run(self, kind: re.Pattern[str], most: int) -> Step[str]:
        """Read the longest run of characters of a class, at most so many."""
        pieces: list[str] = []
        while True:
            found = kind.match(self._buffer, self._at, self._at + most)
            assert found is not None, "a class that may be absent"
            most -= found.end() - self._at
            pieces.append(self.take(found.end()))
            if self._at < len(self._buffer) or self.is_over or not most:
                return "".join(pieces)
            yield

    def upto(self, stops: Stops, sink: Callable[[str], object]) -> Step[str]:
        """Pass text on as it comes, up to a stop, which is returned unread; "" at the end."""
        while True:
            end, stop = stops.find(self._buffer, self._at)
            if not stop and not self.is_over:
                end = stops.find_start(self._buffer, self._at)
            if end > self._at:
                sink(self.take(end))
            if stop or self.is_over:
                return stop
            yield

    def head(self, stops: Stops, most: int) -> Step[tuple[str, str] | None]:
        """Return the text before a stop, and the stop, unread; None beyond `most` characters."""
        pieces: list[str] = []
        while True:
            end, stop = stops.find(self._buffer, self._at)
            if not stop and not self.is_over:
                end = stops.find_start(self._buffer, self._at)
            is_long = end - self._at > most
            end = min(end, self._at + most)
            most -= end - self._at
            pieces.append(self.take(end))
            if is_long:
                return None
            if stop or self.is_over:
                return "".join(pieces), stop
            yield
