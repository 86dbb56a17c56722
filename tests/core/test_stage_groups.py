"""Layers of a stage in the tables of the whole model."""

from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.groups import group_layers, groups_of_stage


@given(st.lists(st.sampled_from([0, 16]), min_size=1, max_size=24), st.data())
def test_each_layer_has_a_place_of_its_own_in_a_table_of_its_kind(windows, data) -> None:
    whole = group_layers(tuple(windows), 1000)
    begin = data.draw(st.integers(0, len(windows) - 1))
    end = data.draw(st.integers(begin + 1, len(windows)))
    part = groups_of_stage(whole, tuple(windows), begin, end)
    assert (part.num_tables, part.num_full) == (whole.num_tables, whole.num_full)
    assert len(set(part.places)) == len(part.places) == end - begin
    assert part.size <= whole.size
    for window, (table, place) in zip(windows[begin:end], part.places, strict=True):
        assert place < part.size
        if whole.num_full:
            assert (table >= whole.num_full) == (window > 0)
            assert table < whole.num_tables
