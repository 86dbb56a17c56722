"""What travels with a response, from whoever sends it."""

from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.stream_state import (
    BeamState,
    StreamState,
    has_beams,
    pack_beams,
    unpack_beams,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
NEAR = st.one_of(st.integers(-2, 9), INT64)


@given(st.lists(NEAR, min_size=5, max_size=9))
def test_any_numbers_are_a_state_that_packs_to_them_or_an_error(values: list[int]) -> None:
    try:
        state, token_ids = StreamState.unpack(values)
    except (ValueError, OverflowError):
        return
    assert state.pack(token_ids) == values
    assert len(token_ids) == len(values) - 6
    assert len(state.tail) <= 3


_BEAMS = st.lists(
    st.builds(BeamState, st.lists(st.integers(0, 9)), st.integers(0, 3), st.booleans()), max_size=4
)


@given(st.integers(-1, 9), st.integers(1, 9), _BEAMS)
def test_beams_are_unpacked_as_they_were_packed(slot: int, number: int, beams) -> None:
    packed = pack_beams(slot, number, beams)
    assert has_beams(packed)
    assert unpack_beams(packed) == (slot, number, beams)


@given(st.lists(NEAR, max_size=12))
def test_any_numbers_are_beams_that_pack_to_them_or_an_error(values: list[int]) -> None:
    values[2:3] = [4]
    if not has_beams(values):
        return
    try:
        slot, number, beams = unpack_beams(values)
    except ValueError:
        return
    assert pack_beams(slot, number, beams) == values
