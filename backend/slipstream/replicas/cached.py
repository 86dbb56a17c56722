"""What the caches of replicas hold, by the digests that they publish; see `wire.Prefixes`."""

from collections import Counter
from collections.abc import Mapping

from slipstream import wire
from slipstream.core.prefix import DigestChain

_PIECE = 8  # blocks that are digested at a time: a prompt that nobody knows costs no more


class PromptDigests:
    """Digests of a prompt's whole blocks, each made once, when it is first asked for.

    Args:
        packed: the prompt's ids, 4 bytes each.
        salt: of the request.
        adapter: the digest of its adapter; empty: none.
    """

    def __init__(self, packed: bytes, salt: str = "", adapter: bytes = b"") -> None:
        self._packed, self._salt, self._adapter = packed, salt, adapter
        self._chains: dict[tuple[bytes, int], DigestChain] = {}

    def of(self, key: bytes, block_size: int, first: int = 0, count: int = 1 << 62) -> list[bytes]:
        """Return the digests of `count` blocks from `first` on, or of as many as there are.

        Replicas share a key as a rule; those that do not cost a chain of digests each.
        """
        chain = self._chains.get((key, block_size))
        if chain is None:
            chain = DigestChain(block_size, key, self._salt, {}, self._adapter)
            self._chains[key, block_size] = chain
        size, known = 4 * block_size, len(chain.digests) - 1
        end = min(first + count, len(self._packed) // size)
        if end > known:
            chain.extend(self._packed[known * size : end * size])
        return chain.digests[1 + first : 1 + end]


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

    def expect(self, prompt: PromptDigests) -> list[bytes]:
        """Note the whole blocks of a prompt that is sent there; return them for `settle`."""
        digests = prompt.of(self.key, self.block_size) if self._is_reused else []
        self._expected.update(digests)
        return digests

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


def num_cached(replicas: Mapping[int, CachedPrefixes], prompt: PromptDigests) -> dict[int, int]:
    """Return how many of a prompt's first tokens each replica has, in whole blocks."""
    return {number: _num_cached(each, prompt) for number, each in replicas.items()}


def _num_cached(cached: CachedPrefixes, prompt: PromptDigests) -> int:
    at = 0
    while len(cached):
        digests = prompt.of(cached.key, cached.block_size, at, _PIECE)
        known = next((i for i, each in enumerate(digests) if not cached.holds(each)), len(digests))
        at += known
        if known < _PIECE:
            break
    return at * cached.block_size
