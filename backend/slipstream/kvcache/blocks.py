"""The pool of KV blocks: who may write where. It knows numbers only, never the memory behind them.

    empty     on the stack, may be handed out now
    kept      idle too, but what it holds may be asked for again; handed out when none is empty
    fenced    nobody's, but a launched step may still touch it
    in use    one reference a sequence that lists it

Every block is in exactly one of the four, or on its way to or from host memory and nobody's: then
it may be shared, and is idle only after that. A block is freed with the fence of the last launched
step and is idle when that step has completed; while steps run one after another, at once. Whoever
shares a block only reads it, so a fence keeps nobody from sharing it again.
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
        """`evict` is told of kept blocks that are handed out, with their priority; `clock` in ns.

        If `has_host`, kept blocks are not handed out: only `take_kept` lets go of them.
        """
        self.num_blocks = num_blocks
        self.num_fenced = 0  # blocks that nobody owns and a launched step may still touch
        self._evict = evict
        self.has_host = has_host
        self.moving: set[int] = set()  # to or from host memory, in use or not
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle = IdleBlocks(clock)
        self._is_kept = [False] * num_blocks  # in whatever state
        self._references = [0] * num_blocks
        self._fence = [0] * num_blocks  # the last step that may touch a fenced block, else 0
        self._fenced: deque[tuple[int, int]] = deque()  # (step, block), some shared since
        self._num_launched = 0
        self._num_completed = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._empty) + (0 if self.has_host else len(self._idle))

    @property
    def num_empty(self) -> int:
        """Idle blocks of which nothing is kept."""
        return len(self._empty)

    @property
    def kept(self) -> set[int]:
        """All blocks of which something is kept, in use and fenced ones too."""
        return {block for block in range(self.num_blocks) if self._is_kept[block]}

    @property
    def num_kept(self) -> int:
        """Idle blocks of which something is kept."""
        return len(self._idle)

    @property
    def num_moving(self) -> int:
        """Blocks that are nobody's, but for a copy to or from host memory."""
        return sum([not self.is_wanted(block) for block in self.moving])

    def is_exclusive(self, block: int) -> bool:
        """Whether one owner has it, and nobody can ask for what it holds."""
        return self._references[block] == 1 and not self._is_kept[block]

    def is_wanted(self, block: int) -> bool:
        """Does anybody own it, or may a launched step still touch it?"""
        return bool(self._references[block] or self._fence[block])

    def is_idle(self, block: int) -> bool:
        """Is it empty or kept?"""
        return not (self._references[block] or self._fence[block] or block in self.moving)

    def num_shareable(self, blocks: Iterable[int]) -> int:
        """How many free blocks less there are, once these are shared."""
        return 0 if self.has_host else sum(map(self.is_idle, blocks))

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks <= num_free` blocks, each with one reference."""
        assert num_blocks <= self.num_free, "allocation beyond the free blocks"
        empty = self._empty
        taken = [empty.pop() for _ in range(min(num_blocks, len(empty)))]
        if len(taken) < num_blocks:
            for blocks, priority in self._idle.pop(num_blocks - len(taken)):
                for block in blocks:
                    self._is_kept[block] = False
                self._evict(blocks, priority)
                taken += blocks
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each, kept or in use; the sharer must never write to them."""
        references, fence, idle = self._references, self._fence, []
        for block in blocks:
            if not references[block]:
                assert self._is_kept[block], "sharing a block that nobody owns"
                if fence[block]:
                    fence[block] = 0
                    self.num_fenced -= 1
                elif block not in self.moving:
                    idle.append(block)
            references[block] += 1
        if idle:
            self._idle.remove(idle)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each; without references it waits for its fence, then is idle."""
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

    def keep(self, blocks: Iterable[int]) -> None:
        """What these blocks, which are in use, hold may be asked for again."""
        references, is_kept = self._references, self._is_kept
        for block in blocks:
            assert references[block], "keeping a block that nobody owns"
            is_kept[block] = True

    def retain(self, block: int, priority: int, duration_ns: int) -> None:
        """How much a block in use is worth once it is idle; a duration of 0 has no end."""
        self._idle.retain(block, priority, duration_ns)

    def drop(self, block: int) -> None:
        """What it holds will not be asked for again."""
        assert self._is_kept[block]
        self._is_kept[block] = False
        if self.is_idle(block):
            self._empty.append(block)
        self._idle.forget(block)

    def take_kept(self) -> tuple[int, int, int]:
        """The kept block that is worth least begins to move; its priority, and that's ns."""
        block, priority, duration_ns = self._idle.take()
        self.moving.add(block)
        return block, priority, duration_ns

    def begin_move(self, block: int) -> None:
        """Something is being copied to a block in use."""
        assert self._references[block]
        self.moving.add(block)

    def end_move(self, block: int, has_left: bool = False) -> None:
        """It has arrived; or what it held has left, which nobody wants then."""
        self.moving.remove(block)
        if has_left:
            assert not self.is_wanted(block), "a block left that is wanted"
            self._is_kept[block] = False
            self._idle.forget(block)
        if not self.is_wanted(block):
            self._settle([block])

    def launch(self) -> None:
        """A step begins that may touch all blocks in use now."""
        self._num_launched += 1

    def complete(self) -> None:
        """The oldest launched step has ended: what only it could touch is idle."""
        assert self._num_completed < self._num_launched, "a step completed that never began"
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
        is_kept, moving, kept = self._is_kept, self.moving, []
        for block in blocks:
            if block in moving:
                continue
            if is_kept[block]:
                kept.append(block)
            else:
                self._empty.append(block)
        if kept:
            self._idle.add(kept)

    def check_integrity(self, owned: Iterable[Iterable[int]]) -> None:
        """Compare with what the owners say they hold: one list of blocks an owner. O(blocks)."""
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
        kept = [block for block in numbers if block in self._idle]
        assert len(kept) == len(self._idle)
        assert all(self._is_kept[block] for block in kept), "a block is idle for nothing"
        assert not any(self._is_kept[block] for block in self._empty), "a block is kept and empty"
        moving = [block for block in self.moving if not self.is_wanted(block)]
        free = self._empty + kept + fenced + moving
        assert len(free) == len(set(free)), "a block is free twice"
        assert all(self._references[block] == 0 for block in free), "a block in use is free"
        num_used = sum(count > 0 for count in self._references)
        assert num_used + len(free) == self.num_blocks, "a block is lost"
