"""What the blocks hold: which one has the keys and values of these tokens, after those before them?

A whole block is found by a digest of its tokens and of all before them (BLAKE2b, 128 bits, keyed
at random when the engine begins, seeded with the tenant's salt): who does not know the key cannot
make two prefixes that share one. A part of a block is found among the blocks that follow the same
prefix, by its tokens.

No block depends on another one here. Where one is gone, those that follow it are not found, and
are again once somebody has computed it anew.
"""

import secrets
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from hashlib import blake2b

_DIGEST_BYTES = 16
_ID_BYTES = array("i").itemsize


def pack(token_ids: list[int]) -> bytes:
    """Token ids as they are compared and digested."""
    return array("i", token_ids).tobytes()


class Chain:
    """The digests of a sequence's whole blocks; `digests[i]` is of all before block `i`."""

    __slots__ = ("_block_size", "_hasher", "_packed", "digests")

    def __init__(self, block_size: int, key: bytes, salt: str) -> None:
        self._block_size = block_size
        data = salt.encode()
        self._hasher = blake2b(len(data).to_bytes(8), digest_size=_DIGEST_BYTES, key=key)
        self._hasher.update(data)
        self._packed = b""  # of the first tokens, while they were digested together
        self.digests = [self._hasher.digest()]

    def copy(self) -> "Chain":
        """Another one that may be extended by other tokens."""
        other = Chain.__new__(Chain)
        other._block_size, other._packed = self._block_size, self._packed
        other._hasher, other.digests = self._hasher.copy(), self.digests.copy()
        return other

    def extend(self, token_ids: list[int]) -> None:
        """Digest the whole blocks of the sequence's tokens that were not there before."""
        size, num_known = self._block_size, len(self.digests) - 1
        num_blocks = len(token_ids) // size
        if num_blocks == num_known:
            return
        packed = pack(token_ids[num_known * size : num_blocks * size])
        if not num_known:
            self._packed = packed
        view, step = memoryview(packed), size * _ID_BYTES
        update, digest, append = self._hasher.update, self._hasher.digest, self.digests.append
        for begin in range(0, len(packed), step):
            update(view[begin : begin + step])
            append(digest())

    def tokens(self, block: int, token_ids: list[int]) -> bytes:
        """Block number `block` of the sequence's tokens, packed; the last one may not be whole."""
        step = self._block_size * _ID_BYTES
        begin = block * step
        if begin + step <= len(self._packed):
            return self._packed[begin : begin + step]
        begin = block * self._block_size
        return pack(token_ids[begin : begin + self._block_size])


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
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}  # by prefix; sorted by tokens
        self.find = self._blocks.get  # the block of a digest, or None

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, block: int) -> bool:
        return block in self._contents

    def chain(self, salt: str) -> Chain:
        """Of no tokens yet; nothing is shared between two salts."""
        return Chain(self._block_size, self._key, salt)

    def closest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """The block after a prefix that begins with the most of these tokens, and how many.

        (-1, 0): none begins with the first of them.
        """
        best, most = -1, 0
        children = self._children.get(parent)
        if children is not None:
            # In the order of their bytes, who shares the longest beginning stands beside it.
            place = bisect_left(children, (tokens, -1))
            for candidate, block in children[max(0, place - 1) : place + 1]:
                count = _num_common(tokens, candidate)
                if count > most:
                    best, most = block, count
        return best, most

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
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = [(tokens, block)]
        else:
            insort(children, (tokens, block))
        if digest is not None:
            assert digest not in self._blocks, "two blocks for one prefix"
            self._blocks[digest] = block

    def forget(self, block: int) -> None:
        """The block will hold something else."""
        parent, digest, tokens = self._contents.pop(block)
        children = self._children[parent]
        if len(children) == 1:
            del self._children[parent]
        else:
            del children[bisect_left(children, (tokens, block))]
        if digest is not None:
            del self._blocks[digest]

    def check_integrity(self, kept: Iterable[int]) -> None:
        """All parts agree, and these are the blocks of which something is known."""
        assert set(kept) == self._contents.keys(), "what is kept is not what is known"
        whole = {held[1]: block for block, held in self._contents.items() if held[1]}
        assert whole == self._blocks
        children = [(p, *child) for p, group in self._children.items() for child in group]
        held = [(parent, tokens, block) for block, (parent, _, tokens) in self._contents.items()]
        assert sorted(children) == sorted(held)
        assert all(group == sorted(group) for group in self._children.values())


def _num_common(one: bytes, other: bytes) -> int:
    """Token ids that both begin with."""
    size = min(len(one), len(other))
    differing = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return (size - (differing.bit_length() + 7) // 8) // _ID_BYTES
