"""What the caches of replicas hold, by the digests that they publish; see `wire.Prefixes`."""

from collections import Counter
from collections.abc import Mapping

from slipstream import wire
from slipstream.core.prefix import DigestChain

_PIECE = 8  # blocks that are digested at a time: a prompt that nobody knows costs no more


class CachedPrefixes:
    """The digests of one replica's whole blocks, and of those that it is about to compute.

    An engine computes a prefix once for all requests that come meanwhile, so a burst of them is to
    meet where the first one went.
    """

    def __init__(self) -> None:
        self.key = b""  # empty: nothing is known
        self.block_size = 0
        self._digests: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()
        self._is_reused = False  # a model without reuse publishes nothing, ever

    def __len__(self) -> int:
        return len(self._digests) + len(self._expected)

    def holds(self, digest: bytes) -> bool:
        """Return whether a block is there, or will be."""
        return digest in self._digests or digest in self._expected

    def expect(self, packed: bytes, salt: str, adapter: bytes) -> list[bytes]:
        """Note the whole blocks of a prompt that is sent there; return them for `settle`."""
        if not self._is_reused:
            return []
        chain = DigestChain(self.block_size, self.key, salt, {}, adapter)
        size = 4 * self.block_size
        chain.extend(packed[: len(packed) // size * size])
        self._expected.update(chain.digests[1:])
        return chain.digests[1:]

    def settle(self, digests: list[bytes]) -> None:
        """Note that a prompt is computed, and published, or never will be."""
        for digest in digests:
            if self._expected[digest] <= 1:
                del self._expected[digest]
            else:
                self._expected[digest] -= 1

    def take(self, message: wire.Prefixes) -> None:
        """Take what a replica has published."""
        if message.is_whole:
            self._digests.clear()
            self.key, self.block_size = message.key, message.block_size
        self._digests.difference_update(message.removed)
        self._digests.update(message.added)
        self._is_reused |= bool(message.added)

    def clear(self) -> None:
        """Discard all: the replica is gone."""
        self.key = b""
        self._digests.clear()
        self._expected.clear()


def num_cached(
    replicas: Mapping[int, CachedPrefixes], packed: bytes, salt: str, adapter: bytes
) -> dict[int, int]:
    """Return how many of a prompt's first tokens each replica has, in whole blocks.

    `packed` has the prompt's ids, 4 bytes each; `adapter`: the digest of its adapter; empty: none.
    Replicas share a key as a rule; those that do not cost a chain of digests each.
    """
    found = dict.fromkeys(replicas, 0)
    groups: dict[tuple[bytes, int], list[int]] = {}
    for number, cached in replicas.items():
        if len(cached):
            groups.setdefault((cached.key, cached.block_size), []).append(number)
    for (key, block_size), members in groups.items():
        chain = DigestChain(block_size, key, salt, {}, adapter)
        size = 4 * block_size
        num_blocks = len(packed) // size
        open_to, at = set(members), 0
        while open_to and at < num_blocks:
            end = min(num_blocks, at + _PIECE)
            chain.extend(packed[at * size : end * size])
            for number in list(open_to):
                holds = replicas[number].holds
                digests = chain.digests[at + 1 : end + 1]
                known = next((i for i, each in enumerate(digests) if not holds(each)), end - at)
                found[number] = (at + known) * block_size
                if known < end - at:
                    open_to.remove(number)
            at = end
    return found
