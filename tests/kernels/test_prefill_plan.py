"""How attention of few, small chunks is shared out: all of it, once, in a place of its own."""

from collections import defaultdict

import pytest
from fixtures.kernels.prefill_plan import MOST_PARTS, ROWS, TILE, Mix, Part, plan
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.attention.prefill import parts_size

CTAS = 132
HEADS = (32, 8)  # of Llama-3.1-8B
chunks = st.tuples(
    st.sampled_from([0, 1, 5, 33, 64, 128, 300, 513, 2048]),
    st.sampled_from([0, 1, 127, 128, 129, 1000, 5000, 40000]) | st.integers(0, 70000),
)


def cut(mix: Mix, heads: tuple[int, int] = HEADS) -> int:
    """The parts of each item that is cut; at most one number."""
    found = {part.parts for part in plan(mix, heads, CTAS)} - {1}
    assert len(found) <= 1
    return found.pop() if found else 1


@pytest.mark.parametrize(
    ("queries", "prefix", "parts"),
    [
        (1, 0, 1),
        (64, 640, 1),
        (64, 2048, 4),
        (16, 32768, 16),
        (64, 32768, 8),
        (128, 32768, 4),
        (256, 32768, 2),
        (512, 32768, 1),
        (2048, 0, 1),
        (2048, 32768, 1),
    ],
)
def test_parts_of_a_chunk(queries: int, prefix: int, parts: int) -> None:
    assert cut([(queries, prefix + queries)]) == parts


def test_many_items_are_whole() -> None:
    assert cut([(512, 4608)] * 4) == cut([(512, 512)] * 8) == cut([(2048, 2048)] * 2) == 1
    assert cut([(64, 32832)] * 8) == cut([(2048, 2048)] + [(17, 17)] * 30) == 1


def test_a_long_one_among_many() -> None:
    """More items than CTAs, but all would wait for a few of them."""
    assert cut([(100, 100)] * 20 + [(64, 32832)]) > 8


def merged(parts: list[Part]) -> list[int]:
    """Which parts are in the result, by the tree of prefill_parts.cuh; arrivals are counted."""
    have = {p.part: [p.part] for p in parts}
    counters = set()
    for level in range(6):
        width = 1 << level
        for left in range(0, len(parts), 2 * width):
            right = left + width
            if right < len(parts):
                assert right not in counters
                counters.add(right)
                have[left] += have.pop(right)
    assert list(have) == [0]
    return have[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(chunks, min_size=1, max_size=12),
    st.sampled_from([(32, 8), (8, 8), (7, 1), (4, 1), (48, 1)]),
)
def test_all_is_attended_to_once(pairs: Mix, heads: tuple[int, int]) -> None:
    mix = [(queries, queries + prefix) for queries, prefix in pairs]
    group = heads[0] // heads[1]
    items: dict[tuple[int, int, int], list[Part]] = defaultdict(list)
    for part in plan(mix, heads, CTAS):
        items[part.sequence, part.kv_head, part.first_row].append(part)
    places = set()
    for (s, _, first_row), parts in items.items():
        queries, length = mix[s]
        begin, end = length - queries, length  # positions
        last = begin + (min(first_row + ROWS, queries * group) - 1) // group
        assert [p.part for p in parts] == list(range(len(parts)))
        assert {p.parts for p in parts} == {len(parts)}
        assert [0, *(p.end for p in parts)] == [*(p.begin for p in parts), last // TILE + 1]
        assert last < end
        if len(parts) > 1:
            first = begin + first_row // group
            # Every row sees a token of every part, which has a sum then.
            assert all(p.end - p.begin >= 2 and p.begin * TILE <= first for p in parts)
            places |= {p.first_part + p.part for p in parts}
            assert sorted(merged(parts)) == list(range(len(parts)))
    rows = [
        (s, h, r)
        for s, (q, _) in enumerate(mix)
        for h in range(heads[1])
        for r in range(0, q * group, ROWS)
    ]
    assert sorted(items) == sorted(rows)
    assert places == set(range(len(places)))
    assert len(places) == sum(len(parts) for parts in items.values() if len(parts) > 1)
    assert len(places) <= MOST_PARTS


def test_places_of_all_parts() -> None:
    """What is allocated for them is what the kernel uses at most."""
    words = 128 // 2 + 4  # sums, maxima and totals of a lane
    assert parts_size(128) == MOST_PARTS * 8 * 32 * words
