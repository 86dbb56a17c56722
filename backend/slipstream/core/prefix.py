"""What the blocks hold: which one has the keys and values of these tokens, after those before them?

A whole block is found by a digest of its tokens and of all before them (BLAKE2b, 128 bits, keyed
at random when the engine begins, seeded with the tenant's salt): who does not know the key cannot
make two prefixes that share one. A part of a block is found among the blocks that follow the same
prefix, by its tokens.

Digests run over a segment, `SEGMENT` blocks, and begin anew with the digest of all before it. So
the last one of a segment can be had at once; where that block is known all digests of the segment
are, and a prompt that is known is digested by the segment instead of the block.

No block depends on another one here. Where one is gone, those that follow it are not found, and
are again once somebody has computed it anew.
"""

import secrets
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from struct import iter_unpack

SEGMENT = 32  # blocks

_DIGEST_BYTES = 16
_ID_BYTES = 4


def split(packed: bytes, block_size: int) -> Iterator[bytes]:
    """Token ids of so many each, of ids of 4 bytes each."""
    return map(itemgetter(0), iter_unpack(f"{block_size * _ID_BYTES}s", packed))


class Chain:
    """The digests of a sequence's whole blocks; `digests[i]` is of all before block `i`."""

    __slots__ = ("_block_size", "_hasher", "_keyed", "_segments", "digests")

    def __init__(
        self, block_size: int, key: bytes, salt: str, segments: Mapping[bytes, Sequence[bytes]]
    ) -> None:
        """`segments` has the digests of segments that are known, by the last of them."""
        self._block_size = block_size
        self._keyed = blake2b(digest_size=_DIGEST_BYTES, key=key)
        self._hasher = self._keyed  # of the segment that has begun
        self._segments = segments
        first = blake2b(salt.encode(), digest_size=_DIGEST_BYTES, key=key, person=b"salt")
        self.digests = [first.digest()]

    @property
    def num_blocks(self) -> int:
        """Those that are digested."""
        return len(self.digests) - 1

    def copy(self) -> "Chain":
        """Another one that may be extended by other tokens."""
        other = Chain.__new__(Chain)
        other._block_size, other._keyed = self._block_size, self._keyed
        other._hasher, other._segments = self._hasher.copy(), self._segments
        other.digests = self.digests.copy()
        return other

    def extend(self, packed: bytes) -> None:
        """Digest the next blocks, all whole: these tokens, of 4 bytes each."""
        size, begin, end, is_known = self._block_size * _ID_BYTES, 0, len(packed), True
        while begin < end:
            num_left = SEGMENT - self.num_blocks % SEGMENT
            part = packed[begin : begin + num_left * size]
            begin += len(part)
            if num_left == SEGMENT:
                # After one that is not known there is hardly another one that is.
                if is_known and len(part) == SEGMENT * size:
                    known = self._segments.get(self._begin(part).digest(), ())
                    self.digests += known
                    if is_known := len(known) > 0:
                        continue
                self._hasher = self._begin()
            update, digest, append = self._hasher.update, self._hasher.digest, self.digests.append
            for block in split(part, self._block_size):
                update(block)
                append(digest())

    def _begin(self, packed: bytes = b"") -> blake2b:
        """The digest of a segment's first tokens."""
        hasher = self._keyed.copy()
        hasher.update(self.digests[-1])
        hasher.update(packed)
        return hasher


# What a block holds: the digest of what is before it, its own (None if it is not whole), tokens.
_Content = tuple[bytes, bytes | None, bytes]


class PrefixIndex:
    """Which block holds what. Every operation is O(1) a block, but for a search of those that
    follow one and the same prefix, by halves."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key = secrets.token_bytes(32)
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, _Content] = {}
        self._child: dict[bytes, int] = {}  # a block that follows a prefix, and where there are
        self._children: dict[bytes, list[int]] = {}  # several, all of them, sorted by `_order`
        self._segments: dict[bytes, list[bytes]] = {}  # the digests of each, by its last
        self.find = self._blocks.get  # the block of a digest, or None

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, block: int) -> bool:
        return block in self._contents

    def chain(self, salt: str) -> Chain:
        """Of no tokens yet; nothing is shared between two salts."""
        return Chain(self._block_size, self._key, salt, self._segments)

    def closest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """The block after a prefix that begins with the most of these tokens, and how many.

        (-1, 0): none begins with the first of them.
        """
        best, most = -1, 0
        if parent not in self._child:
            return best, most
        children = self._children.get(parent, [self._child[parent]])
        # In the order of their bytes, who shares the longest beginning stands beside it.
        place = bisect_left(children, (tokens, -1), key=self._order)
        for block in children[max(0, place - 1) : place + 1]:
            count = _num_common(tokens, self._contents[block][2])
            if count > most:
                best, most = block, count
        return best, most

    def _order(self, block: int) -> tuple[bytes, int]:
        return self._contents[block][2], block

    def digest(self, block: int) -> bytes | None:
        """Of what a block holds; None if it is not whole."""
        return self._contents[block][1]

    def digests(self) -> Iterable[bytes]:
        """Of all whole blocks."""
        return self._blocks.keys()

    def put(self, block: int, parent: bytes, digest: bytes | None, tokens: bytes) -> None:
        """The block holds these tokens after that prefix, in place of what it held before."""
        if block in self._contents:
            self.forget(block)
        self._contents[block] = (parent, digest, tokens)
        child = self._child.setdefault(parent, block)
        if child != block:
            insort(self._children.setdefault(parent, [child]), block, key=self._order)
        if digest is not None:
            assert digest not in self._blocks, "two blocks for one prefix"
            self._blocks[digest] = block

    def remember(self, digests: list[bytes], numbers: range) -> None:
        """The segments that end with one of these blocks of a chain, as long as that is here."""
        for end in range((numbers.start // SEGMENT + 1) * SEGMENT, numbers.stop + 1, SEGMENT):
            if digests[end] in self._blocks:
                self._segments[digests[end]] = digests[end - SEGMENT + 1 : end + 1]

    def forget(self, block: int) -> None:
        """The block will hold something else."""
        parent, digest, _ = self._contents[block]
        children = self._children.get(parent)
        if children is None:
            del self._child[parent]
        else:
            del children[bisect_left(children, self._order(block), key=self._order)]
            self._child[parent] = children[0]
            if len(children) == 1:
                del self._children[parent]
        del self._contents[block]
        if digest is not None:
            del self._blocks[digest]
            self._segments.pop(digest, None)

    def check_integrity(self, kept: Iterable[int]) -> None:
        """All parts agree, and these are the blocks of which something is known."""
        assert set(kept) == self._contents.keys(), "what is kept is not what is known"
        whole = {held[1]: block for block, held in self._contents.items() if held[1]}
        assert whole == self._blocks
        assert self._segments.keys() <= whole.keys(), "a segment outlives its last block"
        assert all(known[-1] == digest for digest, known in self._segments.items())
        groups: dict[bytes, list[int]] = {}
        for block in sorted(self._contents, key=self._order):
            groups.setdefault(self._contents[block][0], []).append(block)
        assert self._child.keys() == groups.keys()
        assert all(child in groups[parent] for parent, child in self._child.items())
        assert self._children == {p: group for p, group in groups.items() if len(group) > 1}


def _num_common(one: bytes, other: bytes) -> int:
    """Token ids that both begin with."""
    size = min(len(one), len(other))
    differing = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return (size - (differing.bit_length() + 7) // 8) // _ID_BYTES
