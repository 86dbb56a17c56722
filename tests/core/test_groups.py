"""Layer groups of equal size: no layer lost, none in a group with another window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.groups import MAX_TABLES, group_layers

layouts = st.lists(st.sampled_from([0, 512]), min_size=1, max_size=80).map(tuple)


@given(layouts, st.integers(1, 10_000))
def test_every_layer_has_a_place_of_its_own(windows: tuple[int, ...], max_tokens: int) -> None:
    groups = group_layers(windows, max_tokens)
    assert len(groups.places) == len(windows)
    assert len(set(groups.places)) == len(windows)
    assert all(0 <= place < groups.size for _, place in groups.places)
    assert {table for table, _ in groups.places} == set(range(groups.num_tables))
    assert groups.num_tables <= MAX_TABLES
    if groups.num_tables == 1:
        assert groups.size == len(windows)
        return
    for (table, _), window in zip(groups.places, windows, strict=True):
        assert (table < groups.num_full) == (window == 0)


def gemma(num_layers: int, window: int) -> tuple[int, ...]:
    return tuple(0 if i % 6 == 5 else window for i in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "max_tokens", "num_full", "num_local", "size"),
    [
        (gemma(26, 512), 32_768, 1, 6, 4),  # Gemma 3 1B: 22 layers see a window
        (gemma(34, 1024), 131_072, 1, 6, 5),  # 4B
        (gemma(48, 1024), 131_072, 1, 5, 8),  # 12B
        (gemma(62, 1024), 131_072, 1, 6, 10),  # 27B
        ((0,) * 20 + (4096,) * 8, 32_768, 5, 2, 4),  # Qwen2 with max_window_layers
        ((0, 512) * 13, 4096, 1, 1, 13),
    ],
)
def test_of_families(
    windows: tuple[int, ...], max_tokens: int, num_full: int, num_local: int, size: int
) -> None:
    groups = group_layers(windows, max_tokens)
    assert (groups.num_full, groups.num_tables - groups.num_full) == (num_full, num_local)
    assert groups.size == size


@pytest.mark.parametrize(
    ("windows", "max_tokens"),
    [((0,) * 30, 4096), ((512,) * 32, 4096), (gemma(26, 512), 512)],
)
def test_where_all_layers_see_the_same_one_table_is_enough(
    windows: tuple[int, ...], max_tokens: int
) -> None:
    groups = group_layers(windows, max_tokens)
    assert groups == (1, 0, len(windows), tuple((0, i) for i in range(len(windows))))
