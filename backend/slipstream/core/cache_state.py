"""Hold what the KV cache knows of one sequence; only `slipstream.kvcache` changes it."""

from dataclasses import dataclass, field
from sys import maxsize

from slipstream.core.batch import BlockCopy
from slipstream.core.prefix import DigestChain


@dataclass(slots=True, eq=False)
class CacheState:
    """The blocks of a sequence, and how much of it the cache can find again.

    `tables` holds the blocks of each layer group, with room for `capacity` positions in each; it is
    empty unless the sequence runs. In the tables of windowed layers the first `num_outside` entries
    have left the window and are no longer the sequence's, or, with a `gap`, the entries of that
    many tokens behind the sinks were removed.
    """

    tables: tuple[list[int], ...] = ()
    capacity: int = 0  # tokens
    num_outside: int = 0  # blocks
    gap: int = 0  # tokens
    chain: DigestChain | None = None  # kept when the sequence is preempted
    copies: list[BlockCopy] = field(default_factory=list)  # into its blocks
    is_proven: bool = False  # sampled since it was admitted, and all samples were finite
    register_at: int = maxsize  # `num_computed` at which the cache registers blocks
    num_registered: int = 0  # blocks in the prefix index
    lead_digest: bytes = b""  # of the first block that it computes itself
    num_allocated_blocks: int = 0  # new blocks, over all admissions
    num_shared_blocks: int = 0  # prefix hits, over all admissions

    def clear(self) -> None:
        """Reset the state of a sequence that has released its blocks; its chain and counts stay."""
        self.tables = ()  # a new tuple: rows in flight keep the old lists
        self.capacity = self.num_outside = self.gap = 0
        self.copies = []
        self.is_proven = False
        self.register_at = maxsize
