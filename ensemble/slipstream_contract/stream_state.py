"""A response on its way from `tensorrt_llm` to `postprocessing`: `STREAM_STATE INT64[-1]`.

Six integers that let postprocessing stay stateless, and the token ids after
them. One tensor, since each costs all four processes between them more than what it holds. A direct
caller of `postprocessing` sends `TOKENS_BATCH` and `SEQUENCE_LENGTH` instead and gets the one-shot
decode.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_FIRST, _LAST, _BEAMS = 1, 2, 4
_MAX_TAIL = 3  # bytes: a character of UTF-8 has four
NUM_INTEGERS = 6  # before the token ids


class BeamState(NamedTuple):
    """A whole beam on its way to postprocessing."""

    token_ids: Sequence[int]
    drop_bytes: int = 0  # cut from the end of the last token's bytes
    is_last: bool = True  # it has ended: an incomplete UTF-8 tail is flushed


def pack_beams(slot: int, number: int, beams: Sequence[BeamState]) -> list[int]:
    """Return the integers of a response that holds whole beams instead of new tokens.

    Their count stands where a stream's `drop_bytes` does; each beam is its length, its
    `drop_bytes`, whether it is the last of it, and its tokens.
    """
    packed = [slot, number, _BEAMS, len(beams), 0, 0]
    for token_ids, drop_bytes, is_last in beams:
        packed += (len(token_ids), drop_bytes, int(is_last), *token_ids)
    return packed


def has_beams(values: Sequence[int]) -> bool:
    """Return whether integers are of `pack_beams` rather than of `StreamState.pack`."""
    return len(values) >= NUM_INTEGERS and values[2] == _BEAMS


def unpack_beams(values: Sequence[int]) -> tuple[int, int, list[BeamState]]:
    """Invert `pack_beams`: return slot, number and beams.

    Raises ValueError for what `pack_beams` never makes.
    """
    slot, number, _, count, *rest = values[:NUM_INTEGERS]
    beams, place = [], NUM_INTEGERS
    for _ in range(count):
        size, drop_bytes, is_last = values[place : place + 3]
        place += 3
        if not 0 <= size <= len(values) - place or drop_bytes < 0 or is_last not in (0, 1):
            raise ValueError(f"a beam of {size} tokens")
        beams.append(BeamState(values[place : place + size], drop_bytes, bool(is_last)))
        place += size
    if place != len(values) or any(rest) or count < 0:
        raise ValueError("integers behind the last beam")
    return slot, number, beams


class StreamState(NamedTuple):
    """Place of a response in its stream."""

    slot: int = -1  # of the credit file; -1: no flow control
    number: int = 0  # of this response in its stream, from 1
    is_first: bool = True  # no token of the stream came before
    is_last: bool = True  # none comes after: an incomplete UTF-8 tail is flushed
    drop_bytes: int = 0  # cut from the end of the last token's bytes
    tail: bytes = b""  # incomplete UTF-8 (0 to 3 bytes) left by the response before

    def pack(self, token_ids: Iterable[int] = ()) -> list[int]:
        """Return six integers, and the tokens of the response."""
        flags = _FIRST * self.is_first | _LAST * self.is_last
        tail = int.from_bytes(self.tail, "little")
        size = len(self.tail)
        return [self.slot, self.number, flags, self.drop_bytes, size, tail, *token_ids]

    @classmethod
    def unpack(cls, values: Sequence[int]) -> tuple["StreamState", Sequence[int]]:
        """Invert `pack`: return the state, and the token ids as they are.

        Raises ValueError or OverflowError for a state that `pack` never makes.
        """
        slot, number, flags, drop_bytes, size, tail = values[:NUM_INTEGERS]
        if not 0 <= size <= _MAX_TAIL:  # before so many bytes are made
            raise ValueError(f"a tail of {size} bytes")
        if not 0 <= flags <= _FIRST | _LAST:
            raise ValueError(f"flags {flags}")
        data = tail.to_bytes(size, "little")
        state = cls(slot, number, bool(flags & _FIRST), bool(flags & _LAST), drop_bytes, data)
        return state, values[NUM_INTEGERS:]
