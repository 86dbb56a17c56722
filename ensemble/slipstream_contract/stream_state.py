"""What a response must carry so that postprocessing can stay stateless: `STREAM_STATE INT64[6]`.

It travels from `tensorrt_llm` to `postprocessing` beside the tokens. A direct caller of
`postprocessing` leaves it out and gets the one-shot decode.
"""

from collections.abc import Sequence
from typing import NamedTuple

_FIRST, _LAST = 1, 2
_MAX_TAIL = 3  # bytes: a character of UTF-8 has four


class StreamState(NamedTuple):
    """One response's place in its stream."""

    slot: int = -1  # of the credit file; -1: no flow control
    number: int = 0  # of this response in its stream, from 1
    is_first: bool = True  # no token of the stream came before
    is_last: bool = True  # none comes after: an incomplete UTF-8 tail is flushed
    drop_bytes: int = 0  # cut from the end of the last token's bytes
    tail: bytes = b""  # incomplete UTF-8 (0 to 3 bytes) left by the response before

    def pack(self) -> list[int]:
        """Six integers."""
        flags = _FIRST * self.is_first | _LAST * self.is_last
        tail = int.from_bytes(self.tail, "little")
        return [self.slot, self.number, flags, self.drop_bytes, len(self.tail), tail]

    @classmethod
    def unpack(cls, values: Sequence[int]) -> "StreamState":
        """Inverse of `pack`. Raises ValueError or OverflowError for what that never makes."""
        slot, number, flags, drop_bytes, size, tail = (int(v) for v in values)
        if not 0 <= size <= _MAX_TAIL:  # before so many bytes are made
            raise ValueError(f"a tail of {size} bytes")
        if not 0 <= flags <= _FIRST | _LAST:
            raise ValueError(f"flags {flags}")
        data = tail.to_bytes(size, "little")
        return cls(slot, number, bool(flags & _FIRST), bool(flags & _LAST), drop_bytes, data)
