"""Word lists int32[2, n]: what is packed comes back, and what is malformed is refused."""

import numpy as np
import pytest
from fixtures.contract.asking import served_or_refused
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from slipstream_contract.errors import ContractError
from slipstream_contract.words import pack_word_list, unpack_word_list

words = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=20)


@given(words)
def test_a_list_comes_back_without_its_empty_words(words):
    packed = pack_word_list(words)
    assert packed.dtype == np.int32
    assert packed.shape == (2, max(1, sum(map(len, words))))
    assert unpack_word_list(packed) == [word for word in words if word]


@given(words, st.integers(0, 7))
def test_padding_changes_nothing(words, extra):
    """Batches are padded to their longest list."""
    padding = np.array([[0] * extra, [-1] * extra], np.int32)
    padded = np.concatenate([pack_word_list(words), padding], axis=1)
    assert unpack_word_list(padded) == [word for word in words if word]


def test_the_published_example():
    packed = pack_word_list([[5, 6], [7]])
    assert packed.tolist() == [[5, 6, 7], [2, 3, -1]]


@given(arrays.arrays(np.int32, st.tuples(st.integers(0, 3), st.integers(0, 6))))
def test_any_array_is_words_or_an_error(array):
    outcome = served_or_refused(unpack_word_list, array, "stop_words_list")
    if isinstance(outcome, ContractError):
        assert "stop_words_list" in outcome.message
    else:
        assert all(min(word) >= 0 for word in outcome)
        assert sum(map(len, outcome)) <= array.shape[1]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([[1, 2], [2, 1]], "ends"),
        ([[1, 2], [3, -1]], "ends"),
        ([[1, 2], [-1, 2]], "ends"),
        ([[1, 2], [-2, -1]], "ends"),
        ([[-4, 2], [1, 2]], "token id -4"),
        ([[1], [1], [1]], r"shape \[3, 1\]"),
        ([1, 2], r"shape \[2\]"),
    ],
)
def test_malformed_lists_are_refused(array, message):
    with pytest.raises(ContractError, match=message):
        unpack_word_list(np.array(array, np.int32))
