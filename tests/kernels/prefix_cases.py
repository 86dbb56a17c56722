"""Sequences that share blocks, and the words of `find_prefixes` by name."""

import random
from typing import NamedTuple

import torch
from kernels.attention_cases import Case
from slipstream.kernels.attention.decode_prefixes import Work, _places

Rows = list[tuple[list[tuple[str, int]], int]]


class Item(NamedTuple):
    """Of prefixes.cuh."""

    leader: int
    begin: int
    end: int
    head: int
    first_member: int
    num_rows: int
    first_row: int
    state: int


class Words:
    """The result of `find_prefixes` for so many rows."""

    def __init__(self, words: list[int], num_rows: int, work: Work) -> None:
        self._words = words
        self.work = work
        members, items = _places(num_rows)
        self.members = words[members:items]
        flat = words[items : items + 8 * words[0]]
        self.items = [Item(*flat[i : i + 8]) for i in range(0, len(flat), 8)]

    def first_own(self, row: int) -> int:
        """Token with which the row's own part begins."""
        return self._words[4 + 2 * row] * 32

    def first_state(self, row: int) -> int:
        return self._words[5 + 2 * row] >> 5

    def num_states(self, row: int) -> int:
        return self._words[5 + 2 * row] & 31


def shared_case(
    rows: Rows,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Each row is pieces (name, tokens), then tokens of its own; none: an empty sequence.

    Rows that begin with the same pieces have them in the same blocks; what no row reads is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    known: dict[tuple[tuple[str, int], ...], list[int]] = {}
    tables: list[list[int]] = []
    total = 1
    for pieces, own in rows:
        table: list[int] = []
        for i, (_, size) in enumerate(pieces):
            key = tuple(pieces[: i + 1])
            if key not in known:
                assert size % block_size == 0
                known[key] = list(range(total, total := total + size // block_size))
            table += known[key]
        table += range(total, total := total + -(-own // block_size))
        tables.append(table)
    sizes = [sum(size for _, size in pieces) + own if own else 0 for pieces, own in rows]
    places = [0, *random.Random(seed).sample(range(1, total), total - 1)]
    cache = torch.full((total, heads[1], 2, block_size, head_size), float("nan"), dtype=dtype)
    padded = torch.zeros((len(rows), max(map(len, tables), default=0) + 2), dtype=torch.int32)
    values = torch.randn(cache.shape, generator=generator).to(dtype)
    for row, (table, length) in enumerate(zip(tables, sizes, strict=True)):
        for i, number in enumerate(table):
            padded[row, i] = places[number]
            used = max(0, min(block_size, length - i * block_size))
            cache[places[number], :, :, :used] = values[places[number], :, :, :used]
    shape = (len(rows), (heads[0] + 2) * head_size)
    q = torch.randn(shape, generator=generator).to(dtype).to(device)
    return Case(
        q[:, : heads[0] * head_size].unflatten(1, (heads[0], head_size)),
        cache.to(device),
        padded.to(device),
        torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        torch.tensor(sizes, dtype=torch.int32, device=device),
        [1] * len(rows),
    )
