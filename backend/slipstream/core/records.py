"""Pack edits of logits into the records that the device reads: token id, and what is added to it.

A ban is an addend of -inf. Records lie by rising token id, each id at most once.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf
from struct import Struct

EDIT = Struct("<if")  # token id, addend of its logit


def pack(addends: Mapping[int, float]) -> bytes:
    """Return the records of what is added to each token's logit."""
    return b"".join(EDIT.pack(*edit) for edit in sorted(addends.items()))


@lru_cache(maxsize=4)
def bans(count: int) -> list[bytes]:
    """Return the ban of each of so many tokens, made once."""
    return [EDIT.pack(token_id, -inf) for token_id in range(count)]


@lru_cache(maxsize=4)
def all_banned(count: int) -> bytes:
    """Return the bans of so many tokens, made once."""
    return b"".join(bans(count))


def mask_of(allowed: Iterable[int], vocab_size: int) -> bytes:
    """Return a mask of bits in which the tokens are legal."""
    mask = bytearray(-(-vocab_size // 8))
    for token_id in allowed:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


class Frame:
    """Bans of all tokens but a few, with room for edits of these."""

    __slots__ = ("_allowed", "_parts", "packed")

    def __init__(self, allowed: Iterable[int], vocab_size: int) -> None:
        self._allowed = sorted(set(allowed))
        every, size = all_banned(vocab_size), EDIT.size
        starts = [0, *((token_id + 1) * size for token_id in self._allowed)]
        ends = [*(token_id * size for token_id in self._allowed), len(every)]
        # Between each allowed token and the next.
        self._parts = [every[start:end] for start, end in zip(starts, ends, strict=True)]
        self.packed = b"".join(self._parts)

    def pack(self, addends: Mapping[int, float]) -> bytes:
        """Return the records with those of the allowed tokens among `addends`."""
        if not addends:
            return self.packed
        made = [self._parts[0]]
        for token_id, part in zip(self._allowed, self._parts[1:], strict=True):
            if token_id in addends:
                made.append(EDIT.pack(token_id, addends[token_id]))
            made.append(part)
        return b"".join(made)


def banned_in(records: bytes) -> set[int]:
    """Return the tokens that records ban."""
    return {token_id for token_id, addend in EDIT.iter_unpack(records) if addend == -inf}
