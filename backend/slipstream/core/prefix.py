"""Index the content of blocks by the tokens that they hold and the tokens before them.

A whole block is found by a digest of its tokens and of all tokens before it: BLAKE2b, 128 bits,
with a random key made at start and seeded with the tenant's salt. Without the key nobody can
construct two prefixes with the same digest. A partly filled block is found by its tokens, among the
blocks that follow the same prefix.

Digests are computed by segments of `SEGMENT` blocks; each segment starts from the digest of all
before it. A segment's last digest can therefore be computed in one call. If a block with that
digest is in the index, the digests of the whole segment are known, so a known prompt costs one
digest a segment instead of one a block.

Blocks do not depend on each other here. After a block is removed, a search for its prefix stops
there; the blocks that follow it are found again once the missing one has been computed anew.
"""

import secrets
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from struct import iter_unpack

from slipstream.core.block_events import BlockEvents

SEGMENT = 32  # blocks

_DIGEST_BYTES = 16
_KEY_BYTES = 32
_ID_BYTES = 4


def split(packed: bytes, block_size: int) -> Iterator[bytes]:
    """Yield packed token ids (4 bytes each) in parts of `block_size` ids."""
    return map(itemgetter(0), iter_unpack(f"{block_size * _ID_BYTES}s", packed))


class DigestChain:
    """The digests of a sequence's whole blocks; `digests[i]` covers everything before block `i`."""

    __slots__ = ("_block_size", "_hasher", "_keyed", "_segments", "digests")

    def __init__(
        self,
        block_size: int,
        key: bytes,
        salt: str,
        segments: Mapping[bytes, Sequence[bytes]],
        adapter: bytes = b"",
    ) -> None:
        """Start a chain without tokens, of what an adapter of that digest computes; empty: none.

        `segments` maps the last digest of a known segment to all of the segment's digests.
        """
        self._block_size = block_size
        self._keyed = blake2b(digest_size=_DIGEST_BYTES, key=key)
        self._hasher = self._keyed  # of the current segment
        self._segments = segments
        person = b"adapter" if adapter else b"salt"  # all digests have one length
        first = blake2b(adapter + salt.encode(), digest_size=_DIGEST_BYTES, key=key, person=person)
        self.digests = [first.digest()]

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are digested."""
        return len(self.digests) - 1

    def copy(self) -> "DigestChain":
        """Return a copy that can be extended by other tokens."""
        other = DigestChain.__new__(DigestChain)
        other._block_size, other._keyed = self._block_size, self._keyed
        other._hasher, other._segments = self._hasher.copy(), self._segments
        other.digests = self.digests.copy()
        return other

    def starts(self, other: "DigestChain") -> bool:
        """Return whether another chain begins with all that this one has."""
        last = len(self.digests) - 1
        return last < len(other.digests) and self.digests[last] == other.digests[last]

    def extend(self, packed: bytes) -> None:
        """Append the digests of the next whole blocks; `packed` holds token ids of 4 bytes each."""
        size, start, end, is_known = self._block_size * _ID_BYTES, 0, len(packed), True
        while start < end:
            num_left = SEGMENT - self.num_blocks % SEGMENT
            part = packed[start : start + num_left * size]
            start += len(part)
            if num_left == SEGMENT:
                # After an unknown segment another known one is unlikely.
                if is_known and len(part) == SEGMENT * size:
                    known = self._segments.get(self._start_segment(part).digest(), ())
                    self.digests += known
                    if is_known := len(known) > 0:
                        continue
                self._hasher = self._start_segment()
            update, digest, append = self._hasher.update, self._hasher.digest, self.digests.append
            for block in split(part, self._block_size):
                update(block)
                append(digest())

    def _start_segment(self, packed: bytes = b"") -> blake2b:
        """Return a hasher of the prefix so far and of the first tokens of the next segment."""
        hasher = self._keyed.copy()
        hasher.update(self.digests[-1])
        hasher.update(packed)
        return hasher


# Content of a block: digest of what is before it, its own (None: not whole), packed tokens, and the
# name of the adapter that computed it (None: not published).
_Content = tuple[bytes, bytes | None, bytes, str | None]


class PrefixIndex:
    """The index from content to blocks.

    Every operation is O(1) a block, except `closest`, which is O(log n) for n blocks that follow
    the same prefix.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, _Content] = {}
        self._child: dict[bytes, int] = {}  # prefix -> a block that follows it
        self._children: dict[bytes, list[int]] = {}  # prefix -> all, sorted, if more than one
        self._segments: dict[bytes, list[bytes]] = {}  # last digest of a segment -> all its digests
        self._news: dict[bytes, bool] | None = None  # digest -> whether it is here
        self.events: BlockEvents | None = None  # of the first table's blocks; None: nobody asks
        self.find = self._blocks.get  # digest -> block, or None

    @property
    def key(self) -> bytes:
        """The key of all digests."""
        return self._key

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    def share(self, key: bytes) -> list[bytes]:
        """Note from here on what is added and removed; return what the first table has.

        An empty index takes `key` for its own, so that several may have the same.
        """
        if not self._contents and len(key) == _KEY_BYTES:
            self._key = key
        self._news = {}
        return [digest for digest in self._blocks if len(digest) == _DIGEST_BYTES]

    def stop_sharing(self) -> None:
        """Note nothing from here on."""
        self._news = None

    def take_news(self) -> tuple[list[bytes], list[bytes]]:
        """Return digests of the first table's blocks that were added and removed since then."""
        news = self._news
        if not news:
            return [], []
        self._news = {}
        added = [digest for digest, is_here in news.items() if is_here]
        return added, [digest for digest, is_here in news.items() if not is_here]

    def _note(self, digest: bytes, is_here: bool) -> None:
        if self._news is not None and len(digest) == _DIGEST_BYTES:
            self._news[digest] = is_here

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, block: int) -> bool:
        return block in self._contents

    def chain(self, salt: str, adapter: bytes = b"") -> DigestChain:
        """Return a chain without tokens. Chains of different salts or adapters share no digest."""
        chain = DigestChain(self._block_size, self._key, salt, self._segments, adapter)
        if self.events is not None and not salt:
            self.events.roots.add(chain.digests[0])
        return chain

    def closest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """Return the block after a prefix that shares the most leading tokens, and how many.

        Returns (-1, 0) if no block starts with the first of `tokens`.
        """
        best, most = -1, 0
        if parent not in self._child:
            return best, most
        children = self._children.get(parent, [self._child[parent]])
        # Sorted by bytes, the block with the longest common start is a neighbour of `tokens`.
        place = bisect_left(children, (tokens, -1), key=self._order)
        for block in children[max(0, place - 1) : place + 1]:
            count = _num_common(tokens, self._contents[block][2])
            if count > most:
                best, most = block, count
        return best, most

    def _order(self, block: int) -> tuple[bytes, int]:
        return self._contents[block][2], block

    def digest(self, block: int) -> bytes | None:
        """Return the digest of a block's content; None for a partly filled block."""
        return self._contents[block][1]

    def digests(self) -> Iterable[bytes]:
        """Return the digests of all whole blocks."""
        return self._blocks.keys()

    def put(
        self,
        block: int,
        parent: bytes,
        digest: bytes | None,
        tokens: bytes,
        adapter: str | None = None,
    ) -> None:
        """Record that a block holds `tokens` after the prefix `parent`, and nothing else.

        Events name the `adapter`, empty for none; with None they leave the block out.
        """
        if block in self._contents:
            self.remove(block)
        self._contents[block] = (parent, digest, tokens, adapter)
        child = self._child.setdefault(parent, block)
        if child != block:
            insort(self._children.setdefault(parent, [child]), block, key=self._order)
        if digest is not None:
            assert digest not in self._blocks, "two blocks for one prefix"
            self._blocks[digest] = block
            self._note(digest, is_here=True)
            if self.events is not None and adapter is not None and len(digest) == _DIGEST_BYTES:
                self.events.store("GPU", digest, parent, tokens, adapter)

    def add_segments(self, digests: list[bytes], numbers: range) -> None:
        """Record the segments of a chain that end with an indexed block among `numbers`."""
        for end in range((numbers.start // SEGMENT + 1) * SEGMENT, numbers.stop + 1, SEGMENT):
            if digests[end] in self._blocks:
                self._segments[digests[end]] = digests[end - SEGMENT + 1 : end + 1]

    def remove(self, block: int, is_in_host: bool = False) -> None:
        """Remove a block whose content is about to be overwritten; host memory may have it now."""
        parent, digest, tokens, adapter = self._contents[block]
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
            self._note(digest, is_here=False)
            if self.events is not None and adapter is not None and len(digest) == _DIGEST_BYTES:
                if is_in_host:
                    self.events.store("CPU", digest, parent, tokens, adapter)
                self.events.remove(digest)
            self._segments.pop(digest, None)

    def check_integrity(self, kept: Iterable[int]) -> None:
        """Assert that all parts agree and that exactly the blocks `kept` are indexed."""
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
    """Return the number of leading token ids that two packed lists share."""
    size = min(len(one), len(other))
    differing = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return (size - (differing.bit_length() + 7) // 8) // _ID_BYTES
