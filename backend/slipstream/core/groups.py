"""Which layers of a model share a table of blocks.

Layers that see the same tokens may. A block of the pool holds the keys and values of one group of
layers, and all groups have places for equally many layers, so that any block serves any group:
memory goes to what sequences need, be they long or short, and there is one pool, one index of what
is found and one place in host memory, whatever the model. Where the layers do not divide evenly
some places stay empty. A sequence has a table for each group.
"""

from typing import NamedTuple

MAX_TABLES = 8  # each costs the host its share of every block's bookkeeping


class Groups(NamedTuple):
    """Tables are counted from 0."""

    num_tables: int
    num_full: int  # of them, the first: their layers see everything, where others do not
    size: int  # layers that a group has places for
    places: tuple[tuple[int, int], ...]  # of each layer: its table, and its place in the group


def group(windows: tuple[int, ...], max_tokens: int) -> Groups:
    """Into groups that take the least memory for a sequence of `max_tokens`.

    Args:
        windows: of each layer, in tokens; 0: it sees everything. No two differ else.
        max_tokens: of the longest sequence; all of it is seen in a window that is as wide.
    """
    full = [i for i, window in enumerate(windows) if not window]
    local = [i for i, window in enumerate(windows) if window]
    seen = max(windows)
    if not full or not local or seen >= max_tokens:
        return Groups(1, 0, len(windows), tuple((0, i) for i in range(len(windows))))
    assert len(set(windows)) == 2, "two windows in one model"

    def counts(size: int) -> tuple[int, int]:
        return -(-len(full) // size), -(-len(local) // size)

    def cost(size: int) -> tuple[int, int]:
        num_full, num_local = counts(size)
        return size * (num_full * max_tokens + num_local * seen), num_full + num_local

    sizes = range(1, max(len(full), len(local)) + 1)
    size = min((size for size in sizes if sum(counts(size)) <= MAX_TABLES), key=cost)
    num_full, num_local = counts(size)
    places = {}
    for first, layers in ((0, full), (num_full, local)):
        for number, layer in enumerate(layers):
            places[layer] = (first + number // size, number % size)
    in_order = tuple(places[layer] for layer in range(len(windows)))
    return Groups(num_full + num_local, num_full, size, in_order)
