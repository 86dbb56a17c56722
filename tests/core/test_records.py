"""Frames of bans, against a ban of each token."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.records import EDIT, Frame, all_banned, banned_in, mask_of, pack

SIZE = 12
ids = st.integers(0, SIZE - 1)


@given(st.sets(ids, min_size=1), st.dictionaries(ids, st.sampled_from([0.5, -2.0, -inf])))
def test_a_frame_bans_all_but_what_it_allows(allowed: set[int], addends: dict[int, float]) -> None:
    wanted = dict.fromkeys(set(range(SIZE)) - allowed, -inf)
    frame = Frame(allowed, SIZE)
    assert dict(EDIT.iter_unpack(frame.packed)) == wanted
    inside = {token_id: addend for token_id, addend in addends.items() if token_id in allowed}
    assert frame.pack(addends) == pack(wanted | inside)
    assert banned_in(frame.packed) == wanted.keys()


def test_all_are_banned() -> None:
    assert banned_in(all_banned(SIZE)) == set(range(SIZE))


@given(st.sets(st.integers(0, SIZE - 1)))
def test_a_mask_has_a_bit_for_each_allowed_token(allowed: set[int]) -> None:
    mask = mask_of(allowed, SIZE)
    assert {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1} == allowed
