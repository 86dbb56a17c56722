"""What travels with a response, from whoever sends it."""

from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.stream_state import StreamState

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
