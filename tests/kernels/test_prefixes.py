"""What rows share is found as it is, and attention by it is attention."""

import dataclasses
import itertools

import pytest
import torch
from fixtures.kernels.attention_cases import Case, attend
from fixtures.kernels.prefix_cases import Item, Words, shared_case
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.attention import decode_prefixes
from slipstream.kernels.attention.decode_prefixes import Work, find_prefixes, num_words
from torch import Tensor

BLOCK = 16
NAMES = st.sampled_from("ab")
PIECES = st.lists(st.tuples(NAMES, st.sampled_from([16, 64, 80, 320])), max_size=4)
ROWS = st.lists(st.tuples(PIECES, st.sampled_from([0, 1, 5, 16, 17, 40])), min_size=1, max_size=12)


def find(case: Case, num_ctas: int = 6, item_rows: int = 16, min_saved: int = 0) -> Words:
    heads = case.q.shape[1]
    work = Work.of(case.cache, heads, item_rows, num_ctas)._replace(min_saved_tokens=min_saved)
    out = torch.empty(num_words(work, len(case.lengths)), dtype=torch.int32)
    find_prefixes(case.block_tables, case.lengths, out, work)
    return Words(out.tolist(), len(case.lengths), work)


def state(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of V by exponentials, their maximum, their total; of queries `[n, d]`."""
    scores = q @ k.T * scale
    highest = scores.amax(1)
    weights = (scores - highest[:, None]).exp()
    return weights @ v, highest, weights.sum(1)


def tokens(case: Case, row: int, head: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V of a kv head, in fp64."""
    block_size = case.cache.shape[3]
    at = torch.arange(begin, end)
    blocks = case.block_tables[row, at // block_size].long()
    k, v = (case.cache[blocks, head, i, at % block_size].double() for i in (0, 1))
    return k, v


def attend_by(case: Case, words: Words) -> Tensor:
    """Attention as the kernels do it: items, then each row's own part, then all of them merged."""
    group = case.q.shape[1] // case.cache.shape[1]
    states: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for item in words.items:
        k, v = tokens(case, item.leader, item.head, item.begin, item.end)
        for place in range(
            item.first_row, min(item.num_rows, item.first_row + words.work.item_rows)
        ):
            row = words.members[item.first_member + place // group]
            query = item.head * group + place % group
            at = (words.first_state(row) + item.state, query)
            assert at not in states
            states[at] = state(case.q[row, query, None].double(), k, v, case.scale)
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for row, length in enumerate(case.lengths.tolist()):
        for query in range(case.q.shape[1] if length else 0):
            own = tokens(case, row, query // group, words.first_own(row), length)
            parts = [state(case.q[row, query, None].double(), *own, case.scale)]
            numbers = range(words.first_state(row), words.first_state(row) + words.num_states(row))
            parts += [states.pop((number, query)) for number in numbers]
            highest = torch.stack([part[1] for part in parts]).amax(0)
            factors = [(part[1] - highest).exp() for part in parts]
            total = sum(f * part[2] for f, part in zip(factors, parts, strict=True))
            sums = sum(f[:, None] * part[0] for f, part in zip(factors, parts, strict=True))
            out[row, query] = (sums / total[:, None])[0]
    assert not states, "a state that nobody reads"
    return out


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, num_ctas=st.sampled_from([1, 6, 40]), item_rows=st.sampled_from([16, 64]))
def test_attention_by_runs_is_attention(
    rows: list[tuple[list[tuple[str, int]], int]], num_ctas: int, item_rows: int
) -> None:
    case = shared_case(rows, (4, 2), 16, BLOCK, torch.float32, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_prefixes, "_MIN_SAVED_TOKENS", 64)
        words = find(case, num_ctas, item_rows)
    assert torch.allclose(attend_by(case, words), attend(case, torch.float64), atol=1e-9)
    for row, length in enumerate(case.lengths.tolist()):
        assert words.first_own(row) < max(1, length), "the newest token is a sequence's own"


@pytest.mark.parametrize("group", [1, 3])
def test_attention_by_levels_is_attention(group: int) -> None:
    """Runs within runs; a last item of one query row."""
    rows = [([("a", 320), (name, 256), (name + "c", 512)], 40) for name in "bb" + 11 * "d"]
    rows += [([("a", 320)], 9)] * 2 + [([], 9)]
    case = shared_case(rows, (2 * group, 2), 16, BLOCK, torch.float32, "cpu")
    words = find(case, num_ctas=200)
    assert max(words.num_states(row) for row in range(len(rows))) >= 3
    assert torch.allclose(attend_by(case, words), attend(case, torch.float64), atol=1e-9)


def test_levels() -> None:
    rows = [([("a", 320), (name, 256)], 40) for name in "aabbbbbb"] + [([("a", 320)], 9)]
    words = find(shared_case(rows, (4, 2), 16, BLOCK, torch.float32, "cpu"))
    assert [words.first_own(row) for row in range(9)] == [320] * 2 + [576] * 6 + [320]
    assert {(i.leader, i.num_rows) for i in words.items} == {(0, 18), (2, 12)}


def test_a_header_that_all_have_is_part_of_longer_runs() -> None:
    """Too short to be read by itself, it is read with what follows."""
    rows = [([("h", 32), (name, 512)], 9) for name in "aaaabbbb"] + [([("h", 32)], 9)]
    words = find(shared_case(rows, (4, 2), 16, BLOCK, torch.float32, "cpu"))
    assert [words.first_own(row) for row in range(9)] == [544] * 8 + [0]
    assert {i.begin for i in words.items if i.state == 0} == {0}


def test_no_run_where_little_is_saved() -> None:
    """A run is worth what it saves, unless that is below half of `min_saved`, or above it."""

    def pays(own: int, min_saved: int) -> bool:
        case = shared_case([([("a", 320)], own)] * 8, (4, 2), 16, BLOCK, torch.float32, "cpu")
        words = find(case, min_saved=min_saved)
        assert {words.first_own(row) for row in range(8)} == {320 if words.items else 0}
        return bool(words.items)

    saved = 7 * 320
    assert pays(9, 2 * saved)
    assert not pays(9, 2 * saved + 2)
    assert pays(250, saved + 2)  # 8 tiles of 32
    assert not pays(280, saved + 2)  # 9
    assert pays(1000, saved)
    assert not pays(1000, saved + 1)
    alone = shared_case([([(str(i), 320)], 9) for i in range(8)], (4, 2), 16, BLOCK, torch.float32)
    assert not find(alone).items


def test_the_newest_block_is_shared_with_nobody() -> None:
    """A sequence owns the block that it writes; where two share it, neither may be right."""
    case = shared_case([([("a", 1024)], 0)] * 3, (4, 2), 16, BLOCK, torch.float32, "cpu")
    whole = dataclasses.replace(case, lengths=torch.full((3,), 1024, dtype=torch.int32))
    whole.block_tables[1:] = whole.block_tables[0]
    assert {find(whole).first_own(row) for row in range(3)} == {1024 - 32}


def test_sizes_hold_the_most_there_can_be() -> None:
    """Items, states and members of a thousand rows in many small classes stay within bounds."""
    for group, item_rows, classes in ((4, 128, 300), (1, 64, 40), (16, 128, 8), (7, 64, 500)):
        tables = torch.zeros((1000, 80), dtype=torch.int32)
        for row in range(1000):
            tables[row, :70] = torch.arange(70) + 100 * (row % classes)
            tables[row, 70:] = 100_000 + 10 * row + torch.arange(10)
        lengths = torch.full((1000,), 80 * 32, dtype=torch.int32)
        work = Work(32, 8, group, item_rows, 132, 0)
        out = find_prefixes(
            tables, lengths, torch.empty(num_words(work, 1000), dtype=torch.int32), work
        )
        words = Words(out.tolist(), 1000, work)
        assert 0 < len(words.items) <= work.max_items(1000)
        most = max(words.first_state(row) + words.num_states(row) for row in range(1000))
        assert most <= work.max_states(1000)


def item_bounds(items: list[Item]) -> list[tuple[int, int]]:
    return sorted({(item.begin, item.end) for item in items})


def test_splits_cover_a_run_once() -> None:
    case = shared_case([([("a", 4096)], 9)] * 4, (4, 2), 16, BLOCK, torch.float32, "cpu")
    for num_ctas in (1, 7, 32, 1000):
        bounds = item_bounds(find(case, num_ctas).items)
        assert bounds[0][0] == 0
        assert bounds[-1][1] == 4096
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        assert len(bounds) <= decode_prefixes.MAX_SPLITS


def test_longer_items_where_they_would_be_more_than_ctas() -> None:
    """A level of half the length: 24 items of 8 tiles, or 8 of them and 8 of 16."""
    rows = [([("a", 512), (name, 1024)], 9) for name in "abcd" for _ in range(8)]
    case = shared_case(rows, (2, 2), 16, BLOCK, torch.float32, "cpu")
    items = find(case, num_ctas=16, item_rows=8).items
    assert len(items) == 16
    assert {item.end - item.begin for item in items} == {512, 1024}
