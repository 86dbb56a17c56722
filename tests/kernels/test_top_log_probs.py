"""The reference of the likeliest tokens: against the definition, row by row, in plain Python."""

import math

import pytest
import torch
from fixtures.kernels.sampling import draw_rows, make_rows
from fixtures.kernels.tops import Found, by_definition, find_tops, make_asks
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.batch import TopMode
from slipstream.core.edits import EDIT

LOGITS = st.one_of(
    st.floats(-30, 30, width=16), st.sampled_from([0.0, 1.0, -0.0, -math.inf]), st.just(2.5)
)


def assert_equal(found: Found, want: Found) -> None:
    assert found.token_ids == want.token_ids
    assert found.rank == want.rank
    assert found.values == pytest.approx(want.values, abs=1e-5)
    assert found.value == pytest.approx(want.value, abs=1e-5)


@given(st.data())
def test_raw_values_and_ranks(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    rows = data.draw(
        st.lists(st.lists(LOGITS, min_size=size, max_size=size), min_size=1, max_size=3)
    )
    for row in rows:
        row[data.draw(st.integers(0, size - 1))] = 3.0  # one is finite
    asks = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, len(rows) - 1),
                st.integers(0, size),
                st.sampled_from([0, int(TopMode.LOGITS)]),
                st.integers(0, size - 1),
            ),
            min_size=1,
            max_size=5,
        )
    )
    found = find_tops(torch.tensor(rows), make_asks(*asks))
    for ask, each in zip(asks, found, strict=True):
        row, num_top, mode, token = ask
        assert_equal(each, by_definition(rows[row], num_top, mode, token))


def test_the_sampled_token_is_that_of_the_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    rows = make_rows(2, result=[4, 1])
    sampled = torch.tensor([9, 2, 9, 9, 0])
    first, second = find_tops(
        logits, make_asks((0, 1, 0, -1), (1, 1, 0, -1)), rows, sampled=sampled
    )
    assert (first.token_ids, first.rank) == ([1], 3)
    assert (second.token_ids, second.rank) == ([0], 2)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_processed_values_are_those_that_were_sampled_from(temperature: float) -> None:
    """Penalties as before the token was counted, bias, bans, temperature, and top-k's cut."""
    raw = [1.0, 4.0, 3.0, 2.5, 0.0, 3.5]
    edits = torch.tensor([list(_words(EDIT.pack(1, -math.inf) + EDIT.pack(3, 1.0)))]).view(-1, 2)
    counts = torch.zeros((3, 6), dtype=torch.int16)
    counts[2, 5] = 2  # of the output
    fields = {"presence": 0.5, "frequency": 0.25, "top_k": 3, "slot": 2, "end_edit": 2}
    rows = make_rows(1, temperature=temperature, **fields)
    drawn = draw_rows(torch.tensor([raw]), rows, edits.int(), counts)
    token = int(drawn.token_ids[0])
    before = [1.0, -math.inf, 3.0, 3.5, 0.0, 2.5]
    if temperature:
        kept = sorted(before)[-3]
        before = [x / temperature if x >= kept else -math.inf for x in before]
    for mode in (TopMode.PROCESSED, TopMode.PROCESSED | TopMode.LOGITS):
        asks = make_asks((0, 6, int(mode), -1), (0, 2, 0, -1))
        processed, plain = find_tops(
            torch.tensor([raw]), asks, rows, edits.int(), counts, drawn.token_ids
        )
        assert_equal(processed, by_definition(before, 6, int(mode), token))
        assert_equal(plain, by_definition(raw, 2, 0, token))


def _words(data: bytes) -> tuple[int, ...]:
    return tuple(torch.frombuffer(bytearray(data), dtype=torch.int32).tolist())
