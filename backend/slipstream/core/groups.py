"""Assign a model's layers to groups that share a table of blocks.

Layers with the same visible tokens can share a table. A block of the pool holds keys and values of
one layer group, and every group has places for equally many layers, so any block serves any group.
Memory therefore goes to the sequences that need it, long or short, and there is one pool, one
prefix index and one host tier, whatever the model. If the layers do not divide evenly, some places
stay empty. A sequence has one table for each group.
"""

from typing import NamedTuple

MAX_TABLES = 8  # the host's bookkeeping grows with each table


class LayerGroups(NamedTuple):
    """The groups of a model's layers; tables are numbered from 0."""

    num_tables: int
    num_full: int  # the first of them: full attention, beside windowed layers
    size: int  # places for layers in a group
    places: tuple[tuple[int, int], ...]  # for each layer: its table, its place in the group


def groups_of_stage(
    whole: LayerGroups, windows: tuple[int, ...], begin: int, end: int
) -> LayerGroups:
    """Return the groups of layers `begin` to `end`, in the tables of the whole model.

    A block has places for as many layers of each table as this stage needs. A table may serve any
    layers with the same visible tokens, so its own are spread over all that it could use.
    """
    kinds: dict[bool, list[int]] = {True: [], False: []}  # layers by whether a table hides tokens
    is_split = whole.num_full > 0
    for layer in range(begin, end):
        kinds[is_split and windows[layer] > 0].append(layer)
    num_local = whole.num_tables - whole.num_full if is_split else 0
    tables = {False: (0, whole.num_tables - num_local), True: (whole.num_full, num_local)}
    size = max(-(-len(kinds[k]) // tables[k][1]) for k in kinds if kinds[k])
    places = {}
    for kind, layers in kinds.items():
        for number, layer in enumerate(layers):
            places[layer] = (tables[kind][0] + number // size, number % size)
    in_order = tuple(places[layer] for layer in range(begin, end))
    return LayerGroups(whole.num_tables, whole.num_full, size, in_order)


def group_layers(windows: tuple[int, ...], max_tokens: int) -> LayerGroups:
    """Return the groups that need the least memory for a sequence of `max_tokens`.

    Args:
        windows: attention window of each layer in tokens, 0 for full attention; at most one size
            besides 0.
        max_tokens: length of the longest sequence. A layer whose window is at least this long never
            hides a token and counts as one with full attention.
    """
    full = [i for i, window in enumerate(windows) if not window]
    local = [i for i, window in enumerate(windows) if window]
    seen = max(windows)
    if not full or not local or seen >= max_tokens:
        return LayerGroups(1, 0, len(windows), tuple((0, i) for i in range(len(windows))))
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
    return LayerGroups(num_full + num_local, num_full, size, in_order)
