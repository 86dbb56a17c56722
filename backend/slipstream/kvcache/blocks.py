"""Manage the pool of KV blocks: which block may be written, shared or handed out.

    empty     holds nothing; handed out first
    cached    idle, but holds a prefix that may be found again; handed out when none is empty
    fenced    without an owner, but a launched step may still read or write it
    in use    one reference for each sequence that lists it

Every block is in exactly one of these states, or is moving to or from host memory without an owner:
such a block can be shared, and is idle only after the move. A freed block gets the fence of the
last launched step and becomes idle when that step has completed; with no step in flight it is idle
at once. A shared block is only read, so a fence does not prevent sharing it again. Blocks are
numbers here; the memory behind them belongs to the runner.
"""

from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic_ns

from slipstream.kvcache.retention import IdleBlocks


class BlockManager:
    """A fixed pool of reference-counted blocks. Every operation is O(1) a block."""

    def __init__(
        self,
        num_blocks: int,
        clock: Callable[[], int] = monotonic_ns,
        evict: Callable[[list[int], int], None] = lambda blocks, priority: None,
        has_host: bool = False,
    ) -> None:
        """Make a pool of empty blocks.

        Args:
            num_blocks: size of the pool.
            clock: time in ns.
            evict: called with cached blocks that are handed out, and their priority.
            has_host: whether there is host memory; cached blocks are then never handed out by
                `allocate`, but leave by `take_least_valuable`.
        """
        self.num_blocks = num_blocks
        self.num_fenced = 0  # without an owner, but a launched step may still touch them
        self._evict = evict
        self.has_host = has_host
        self.moving: set[int] = set()  # to or from host memory, in use or not
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle = IdleBlocks(clock)
        self._is_cached = [False] * num_blocks  # whatever its state
        self._references = [0] * num_blocks
        self._fence = [0] * num_blocks  # the last step that may touch a fenced block, else 0
        self._fenced: deque[tuple[int, int]] = deque()  # (step, block); some were shared since
        self._num_launched = 0
        self._num_completed = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can hand out now."""
        return len(self._empty) + (0 if self.has_host else len(self._idle))

    @property
    def num_empty(self) -> int:
        """Number of idle blocks that hold nothing."""
        return len(self._empty)

    @property
    def cached(self) -> set[int]:
        """All blocks that hold a prefix, also those that are in use or fenced."""
        return {block for block in range(self.num_blocks) if self._is_cached[block]}

    @property
    def num_cached(self) -> int:
        """Number of idle blocks that hold a prefix."""
        return len(self._idle)

    @property
    def num_moving(self) -> int:
        """Number of blocks without an owner or fence that are moving to or from host memory."""
        return sum([not self.is_busy(block) for block in self.moving])

    def is_exclusive(self, block: int) -> bool:
        """Return whether a block has one owner and cannot be found by others."""
        return self._references[block] == 1 and not self._is_cached[block]

    def num_references(self, block: int) -> int:
        """Return how many owners a block has, copies from it included."""
        return self._references[block]

    def is_busy(self, block: int) -> bool:
        """Return whether a block has an owner, or a launched step may still touch it."""
        return bool(self._references[block] or self._fence[block])

    def is_idle(self, block: int) -> bool:
        """Return whether a block is empty or cached."""
        return not (self._references[block] or self._fence[block] or block in self.moving)

    def num_shareable(self, blocks: Iterable[int]) -> int:
        """Return by how much sharing these blocks reduces `num_free`."""
        return 0 if self.has_host else sum(map(self.is_idle, blocks))

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks <= num_free` blocks, each with one reference."""
        assert num_blocks <= self.num_free, "allocation beyond the free blocks"
        empty = self._empty
        taken = [empty.pop() for _ in range(min(num_blocks, len(empty)))]
        if len(taken) < num_blocks:
            for blocks, priority in self._idle.pop(num_blocks - len(taken)):
                for block in blocks:
                    self._is_cached[block] = False
                self._evict(blocks, priority)
                taken += blocks
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, cached or in use; the new owner must never write to it."""
        references, fence, idle = self._references, self._fence, []
        for block in blocks:
            if not references[block]:
                assert self._is_cached[block], "sharing a block without an owner"
                if fence[block]:
                    fence[block] = 0
                    self.num_fenced -= 1
                elif block not in self.moving:
                    idle.append(block)
            references[block] += 1
        if idle:
            self._idle.remove(idle)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each block; one without references is idle after its fence."""
        references, step, freed = self._references, self._num_launched, []
        for block in blocks:
            assert references[block] > 0, "double free"
            references[block] -= 1
            if not references[block]:
                freed.append(block)
        if self._num_completed == step:
            self._settle(freed)
            return
        for block in freed:
            self._fence[block] = step
            self._fenced.append((step, block))
        self.num_fenced += len(freed)

    def mark_cached(self, blocks: Iterable[int]) -> None:
        """Mark blocks in use as holding a prefix: without owners they become cached, not empty."""
        references, is_cached = self._references, self._is_cached
        for block in blocks:
            assert references[block], "caching a block without an owner"
            is_cached[block] = True

    def retain(self, block: int, priority: int, duration_ns: int) -> None:
        """Set the eviction priority of a block in use; see `IdleBlocks.retain`."""
        self._idle.retain(block, priority, duration_ns)

    def uncache(self, block: int) -> None:
        """Mark a block as holding no prefix any more."""
        assert self._is_cached[block]
        self._is_cached[block] = False
        if self.is_idle(block):
            self._empty.append(block)
        self._idle.discard(block)

    def take_least_valuable(self) -> tuple[int, int, int]:
        """Start to move the block that goes first; return it, its priority and duration (ns)."""
        block, priority, duration_ns = self._idle.take()
        self.moving.add(block)
        return block, priority, duration_ns

    def start_move(self, block: int) -> None:
        """Mark a block in use as the target of a copy from host memory."""
        assert self._references[block]
        self.moving.add(block)

    def finish_move(self, block: int, has_left: bool = False) -> None:
        """Mark a move as ended. With `has_left`, the block's content is now in host memory only."""
        self.moving.remove(block)
        if has_left:
            assert not self.is_busy(block), "a busy block left"
            self._is_cached[block] = False
            self._idle.discard(block)
        if not self.is_busy(block):
            self._settle([block])

    def launch(self) -> None:
        """Count a launched step, which may touch all blocks that are in use now."""
        self._num_launched += 1

    def complete(self) -> None:
        """Count the oldest launched step as completed: the blocks that it fenced are idle."""
        assert self._num_completed < self._num_launched, "a step completed that was never launched"
        self._num_completed += 1
        settled = []
        while self._fenced and self._fenced[0][0] <= self._num_completed:
            step, block = self._fenced.popleft()
            if self._fence[block] == step:  # else it was shared again
                self._fence[block] = 0
                settled.append(block)
        self.num_fenced -= len(settled)
        self._settle(settled)

    def _settle(self, blocks: list[int]) -> None:
        is_cached, moving, cached = self._is_cached, self.moving, []
        for block in blocks:
            if block in moving:
                continue
            if is_cached[block]:
                cached.append(block)
            else:
                self._empty.append(block)
        if cached:
            self._idle.add(cached)

    def check_integrity(self, owned: Iterable[Iterable[int]]) -> None:
        """Assert that references equal the owners' lists, and that no block is lost. O(blocks)."""
        expected = [0] * self.num_blocks
        for blocks in owned:
            for block in blocks:
                expected[block] += 1
        assert expected == self._references, "references differ from the owners' lists"
        self._idle.check_integrity()
        numbers = range(self.num_blocks)
        fenced = [block for block in numbers if self._fence[block]]
        assert len(fenced) == self.num_fenced
        assert {(self._fence[block], block) for block in fenced} <= set(self._fenced)
        cached = [block for block in numbers if block in self._idle]
        assert len(cached) == len(self._idle)
        assert all(self._is_cached[block] for block in cached), "an idle block holds nothing"
        assert not any(self._is_cached[block] for block in self._empty), "an empty block is cached"
        moving = [block for block in self.moving if not self.is_busy(block)]
        free = self._empty + cached + fenced + moving
        assert len(free) == len(set(free)), "a block is free twice"
        assert all(self._references[block] == 0 for block in free), "a block in use is free"
        num_used = sum(count > 0 for count in self._references)
        assert num_used + len(free) == self.num_blocks, "a block is lost"
