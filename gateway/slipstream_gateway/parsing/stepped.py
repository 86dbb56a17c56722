"""Parse an answer by a generator, which goes on with each piece of text."""

from collections.abc import Callable, Sequence

from slipstream_gateway.answer import Delta
from slipstream_gateway.parsing.deltas import Deltas, Surfaces
from slipstream_gateway.parsing.reader import Reader, Step


class SteppedParser:
    """What is read of one answer, and what is made of it; see `slipstream_gateway.answer.Parser`.

    A parser of a format sets `_steps`, which reads `_reader` and writes to `_out`.
    """

    _steps: Step[None]

    def __init__(self, surfaces: Surfaces, make_id: Callable[[str, int], str]) -> None:
        self._surfaces = surfaces
        self._reader = Reader()
        self._out = Deltas(make_id)

    def feed(self, token_ids: Sequence[int], texts: Sequence[str]) -> list[Delta]:
        """Return what the new tokens add."""
        self._reader.feed("".join(map(self._surfaces.read, token_ids, texts)))
        next(self._steps, None)
        return self._out.take()

    def finish(self) -> list[Delta]:
        """Return what was held back, at the end of the answer."""
        self._reader.is_over = True
        next(self._steps, None)
        return self._out.take()
