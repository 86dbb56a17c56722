"""A response on its way from `tensorrt_llm` to `postprocessing`: `STREAM_STATE INT64[-1]`.

Six integers that let postprocessing stay stateless, and the token ids after
them. One tensor, since each costs all four processes between them more than what it holds. A direct
caller of `postprocessing` sends `TOKENS_BATCH` and `SEQUENCE_LENGTH` instead and gets the one-shot
decode.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_FIRST, _LAST = 1, 2
_MAX_TAIL = 3  # bytes: a character of UTF-8 has four
NUM_INTEGERS = 6  # before the token ids


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
