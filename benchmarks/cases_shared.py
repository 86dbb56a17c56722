"""Decode attention of sequences that share blocks, at Llama-3.1-8B's heads.

A line's limit counts what is shared once. `alone` reads it for each sequence, as without block
tables in the plan; `plan` is what a step pays once.
"""

from collections.abc import Callable

import torch
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from timing import BLOCK, HEAD_SIZE, KV_HEADS, Q_HEADS, Result, measure, rows

TOKEN_BYTES = KV_HEADS * HEAD_SIZE * 4
Sequence = tuple[tuple[tuple[str, int], ...], int]  # pieces (name, tokens) in common, own tokens


def mixes() -> dict[str, list[Sequence]]:
    """By name."""
    return {
        "256 x (1024 + 64..127)": [((("a", 1024),), 64 + i % 64) for i in range(256)],
        "256 x 384, none": [((), 384)] * 256,
        "64 x (992 + 1608)": [((("a", 992),), 1608)] * 64,
        "8 x 32 x (512 + 1024 + 96)": [((("a", 512), (str(i % 8), 1024)), 96) for i in range(256)],
        "256 x (4096 + 128)": [((("a", 4096),), 128)] * 256,
        "16 x (8192 + 256)": [((("a", 8192),), 256)] * 16,
        "4 x (4096 + 256)": [((("a", 4096),), 256)] * 4,
        "1 x 4096": [((), 4096)],
    }


def lay_out(sequences: list[Sequence]) -> tuple[torch.Tensor, list[int], int]:
    """Tables over shuffled blocks, lengths, blocks in all."""
    known: dict[tuple[tuple[str, int], ...], list[int]] = {}
    tables, total = [], 0
    for pieces, own in sequences:
        table: list[int] = []
        for i, (_, size) in enumerate(pieces):
            if pieces[: i + 1] not in known:
                known[pieces[: i + 1]] = list(range(total, total := total + size // BLOCK))
            table += known[pieces[: i + 1]]
        tables.append([*table, *range(total, total := total + -(-own // BLOCK))])
    order = torch.randperm(total, dtype=torch.int32)
    padded = torch.zeros((len(tables), max(map(len, tables))), dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = order[table]
    lengths = [sum(size for _, size in pieces) + own for pieces, own in sequences]
    return padded, lengths, total


def make(sequences: list[Sequence], shares: bool, of_plan: bool) -> Callable[[], object]:
    """A call of the kernel, or of those that make its plan."""
    tables, lengths, num_blocks = lay_out(sequences)
    tables, lens = tables.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = rows(len(lengths), Q_HEADS, HEAD_SIZE)
    cache = rows(num_blocks, KV_HEADS, 2, BLOCK, HEAD_SIZE)
    known = tables if shares else None
    plan = plan_decode(lens, cache, Q_HEADS, block_tables=known)
    if of_plan:
        return lambda: plan_decode(lens, cache, Q_HEADS, block_tables=known)
    return lambda: decode_attention(q, cache, tables, lens, plan, HEAD_SIZE**-0.5)


def work(sequences: list[Sequence]) -> tuple[int, int]:
    """Bytes that must be read, what is shared once; operations."""
    seen = {pieces[: i + 1]: piece[1] for pieces, _ in sequences for i, piece in enumerate(pieces)}
    tokens = sum(seen.values()) + sum(own for _, own in sequences)
    pairs = sum(sum(size for _, size in pieces) + own for pieces, own in sequences)
    return tokens * TOKEN_BYTES, 4 * HEAD_SIZE * Q_HEADS * pairs


def cases() -> list[Result]:
    """Their times."""
    results = []
    for name, sequences in mixes().items():
        num_bytes, operations = work(sequences)
        for kernel, shares, of_plan in (
            ("shared", True, False),
            ("alone", False, False),
            ("plan, shared", True, True),
            ("plan, alone", False, True),
        ):

            def one(
                sequences: list[Sequence] = sequences, shares: bool = shares, plan: bool = of_plan
            ) -> Callable[[], object]:
                return make(sequences, shares, plan)

            of = (0 if of_plan else num_bytes, 0 if of_plan else operations)
            results.append(measure(kernel, name, one, max(1, of[0]), of[1]))
    return results
