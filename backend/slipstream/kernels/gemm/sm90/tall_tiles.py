"""Tiles of tall GEMMs of int8: those that a model of the multiprocessor takes to be the fastest.

Sums of int8 are exact, so no tiling changes a bit: a cluster's CTAs may share out a tile's inputs,
and add up what they have. So some hundred rows of a small matrix fill all multiprocessors with
tiles that are wide enough for shared memory and the L2 cache to feed the tensor cores.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.kernels.gemm.sm90.skinny import CHUNK_BYTES, MEMORY

_GROUPS = {192: 3, 256: 2}  # warpgroups, by rows of x of a tile
CLUSTERS = (1, 2, 4)  # CTAs that share out the inputs of a tile
ROWS = range(96, 225, 16)  # of a tile's weights
BARRIER_BYTES = 8
_FEWEST_SLOTS = 3
_SUM_BYTES = 4
# What a multiprocessor of an H200 does in a clock, by data sheet and by its skinny GEMM (the L2
# cache); the clocks that a tile takes beside its steps are by what tiles of 256 x 224 took.
_MULTIPLICATIONS, _SHARED_BYTES, _L2_BYTES, _SENT_BYTES = 4096, 128, 44, 32
_CLOCKS_OF_TILE = 3000
_POWER = 1 / 16  # of all that it does, what it waits for beside the longest: of two, less is taken


@dataclass(frozen=True, slots=True)
class TallTiling:
    """Division of a GEMM: tiles of `x_rows` rows of x by `rows` weight rows."""

    x_rows: int
    rows: int
    # CTAs that share out the inputs of a tile, and each finish some of its columns; 0: a CTA
    # finishes halves of columns side by side, as a gate asks for.
    cluster: int = 0

    @property
    def groups(self) -> int:
        """Count the warpgroups."""
        return _GROUPS[self.x_rows]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a chunk of x and of a tile's weights."""
        return (self.x_rows + self.rows) * CHUNK_BYTES

    @property
    def end_bytes(self) -> int:
        """Bytes of scales and biases of columns, of their alignment, and of a cluster's barrier."""
        return 2 * 4 * self.rows + BARRIER_BYTES + (16 if self.cluster > 1 else 0)

    @property
    def num_slots(self) -> int:
        """Count the slots that fit into the shared memory of a multiprocessor."""
        return (MEMORY - self.end_bytes) // (self.slot_bytes + BARRIER_BYTES)

    @property
    def bytes(self) -> int:
        """Bytes of shared memory."""
        return self.num_slots * (self.slot_bytes + BARRIER_BYTES) + self.end_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums that are in shared memory at once, where the ring was."""
        if self.cluster <= 1:  # of one block of 64 rows a warpgroup
            return 64 * self.groups * self.rows * _SUM_BYTES
        own = -(-self.rows // (8 * self.cluster))  # pieces of eight columns
        return self.cluster * own * 8 * self.x_rows * _SUM_BYTES

    @property
    def is_legal(self) -> bool:
        """Whether a multiprocessor has room for it."""
        fits = self.sum_bytes <= self.num_slots * self.slot_bytes
        return fits and self.num_slots >= _FEWEST_SLOTS

    def num_tiles(self, num_rows: int, num_weight_rows: int) -> int:
        """Count the tiles of a product."""
        return -(-num_rows // self.x_rows) * -(-num_weight_rows // self.rows)

    def clocks(
        self, num_rows: int, num_weight_rows: int, num_chunks: int, multiprocessors: int
    ) -> float:
        """Return about how long a product takes, whose rows have so many chunks of 128 bytes."""
        ctas = max(1, self.cluster)
        clusters = multiprocessors // ctas
        if self.cluster == 4:  # not every multiprocessor finds three others of its cluster
            clusters = clusters * 10 // 11
        waves = -(-self.num_tiles(num_rows, num_weight_rows) // clusters)
        both = self.x_rows + self.rows
        parts = (
            self.x_rows * self.rows / _MULTIPLICATIONS,
            (2 * self.x_rows + (1 + self.x_rows / 64) * self.rows) / _SHARED_BYTES,
            both / _L2_BYTES,
        )
        step = CHUNK_BYTES * (max(parts) + _POWER * sum(parts))
        sums = self.x_rows * self.rows * _SUM_BYTES
        end = 2 * sums / _SHARED_BYTES + (1 - 1 / ctas) * sums / _SENT_BYTES
        return waves * (-(-num_chunks // ctas) * step + end + _CLOCKS_OF_TILE)


def tilings(is_ungated: bool) -> Iterator[TallTiling]:
    """Yield all that are legal; those with gates have no clusters."""
    for sizes in itertools.product(_GROUPS, ROWS, CLUSTERS if is_ungated else (0,)):
        if (made := TallTiling(*sizes)).is_legal:
            yield made


@functools.cache
def fastest(
    num_rows: int, num_weight_rows: int, num_chunks: int, is_ungated: bool, multiprocessors: int
) -> TallTiling:
    """Return the tiling of a product that the model takes to be the fastest."""
    sizes = (num_rows, num_weight_rows, num_chunks, multiprocessors)
    return min(tilings(is_ungated), key=lambda each: each.clocks(*sizes))
