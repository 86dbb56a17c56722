"""The pool of KV blocks: who may write where. It knows numbers only, never the memory behind them.

    free      on the stack, may be handed out now
    fenced    nobody's, but a launched step may still touch it
    in use    one reference a sequence that lists it

Every block is in exactly one of the three. A block is freed with the fence of the last launched
step and comes back when that step has completed; while steps run one after another, at once.
"""

from collections import deque
from collections.abc import Iterable


class BlockManager:
    """A fixed pool of reference-counted blocks. Every operation is O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._fenced: deque[tuple[int, int]] = deque()  # (last step that may touch it, block)
        self._num_launched = 0
        self._num_completed = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody owns and a launched step may still touch."""
        return len(self._fenced)

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks <= num_free` blocks, each with one reference."""
        assert num_blocks <= len(self._free), "allocation beyond the free blocks"
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each; the sharer must never write to them."""
        for block in blocks:
            assert self._references[block] > 0, "sharing a block that nobody owns"
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each; without references it waits for its fence, then is free."""
        is_idle = self._num_completed == self._num_launched
        for block in blocks:
            assert self._references[block] > 0, "double free"
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if is_idle:
                self._free.append(block)
            else:
                self._fenced.append((self._num_launched, block))

    def launch(self) -> None:
        """A step begins that may touch all blocks in use now."""
        self._num_launched += 1

    def complete(self) -> None:
        """The oldest launched step has ended: what only it could touch is free."""
        assert self._num_completed < self._num_launched, "a step completed that never began"
        self._num_completed += 1
        while self._fenced and self._fenced[0][0] <= self._num_completed:
            self._free.append(self._fenced.popleft()[1])

    def check_integrity(self, owned: Iterable[Iterable[int]]) -> None:
        """Compare with what the owners say they hold: one list of blocks an owner. O(blocks)."""
        expected = [0] * self.num_blocks
        for blocks in owned:
            for block in blocks:
                expected[block] += 1
        assert expected == self._references, "references differ from the owners' lists"
        idle = self._free + [block for _, block in self._fenced]
        assert len(idle) == len(set(idle)), "a block is free twice"
        assert all(self._references[block] == 0 for block in idle), "a block in use is free"
        num_used = sum(count > 0 for count in self._references)
        assert num_used + len(idle) == self.num_blocks, "a block is lost"
