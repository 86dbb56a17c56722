"""What of a sequence is computed already, and in which blocks: the scheduler's only way to them.

A running sequence holds the blocks of its table (`Sequence.block_ids`), others hold none.

    admit     a table with room for so many tokens; what the cache has of them counts as computed
    grow      one more block
    release   the table is gone; launched steps may still touch it, so it is fenced
    launch    a step begins, with the copies of blocks that must come before it
    complete  the oldest step has ended
"""

from collections.abc import Iterable

from slipstream.engine.blocks import BlockManager
from slipstream.engine.sequence import Sequence

Copies = tuple[tuple[int, int], ...]


class KVCache:
    """The tables of all sequences, over one pool of blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = BlockManager(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be had now."""
        return self._blocks.num_free

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody owns and a launched step may still touch."""
        return self._blocks.num_fenced

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, num_tokens: int, num_spare: int) -> bool:
        """Give a sequence room for so many tokens, or for as many as the cache has.

        False, and nothing has changed, if that does not leave `num_spare` blocks free.
        """
        shared = self._shareable(sequence)
        num_new = min(self.blocks_for(num_tokens), self.num_blocks) - len(shared)
        if num_new + num_spare > self.num_free:
            return False
        self._blocks.share(shared)
        sequence.block_ids = shared + self._blocks.allocate(num_new)
        sequence.capacity = len(sequence.block_ids) * self.block_size
        sequence.num_computed = sequence.num_scheduled = len(shared) * self.block_size
        sequence.num_shared_blocks += len(shared)
        sequence.num_allocated_blocks += num_new
        return True

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Full blocks of the prompt a sibling has computed, without the prompt's last token."""
        num_blocks = (sequence.num_prompt - 1) // self.block_size
        for sibling in sequence.request.sequences if num_blocks else ():
            if sibling.num_computed >= num_blocks * self.block_size and sibling.block_ids:
                return sibling.block_ids[:num_blocks]
        return []

    def grow(self, sequence: Sequence) -> None:
        """One block more; there must be a free one."""
        sequence.block_ids += self._blocks.allocate(1)
        sequence.capacity += self.block_size
        sequence.num_allocated_blocks += 1

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; what it has computed counts no more."""
        self._blocks.free(sequence.block_ids)
        sequence.block_ids = []  # a new list: rows in flight keep the old one
        sequence.capacity = sequence.num_computed = sequence.num_scheduled = 0

    def launch(self) -> Copies:
        """A step begins that may touch all tables; what must be copied before, from and to."""
        self._blocks.launch()
        return ()

    def complete(self) -> None:
        """The oldest launched step has ended, whether it failed or not."""
        self._blocks.complete()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Every block accounted for, no shared one written. O(blocks)."""
        running = list(running)
        self._blocks.check_integrity(s.block_ids for s in running)
        size = self.block_size
        owners: dict[int, int] = {}
        for sequence in running:
            assert sequence.num_scheduled <= sequence.capacity == len(sequence.block_ids) * size
            for block in sequence.block_ids[sequence.num_computed // size :]:
                assert owners.setdefault(block, sequence.id) == sequence.id, "two writers"
        for sequence in running:
            for block in sequence.block_ids[: sequence.num_computed // size]:
                assert owners.get(block, sequence.id) == sequence.id, "a shared block is written"
