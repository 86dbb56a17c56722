"""`retention_*` inputs of `tensorrt_llm`, and `cache_salt`."""

import re

import numpy as np
import pytest
from fixtures.contract.asking import inputs_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.errors import ContractError
from slipstream_contract.limits import MAX_RANGES
from slipstream_contract.request import GenerateRequest
from slipstream_contract.retention import (
    Retention,
    TokenRange,
    check_retention,
    split_salt,
)
from slipstream_contract.schemas.trtllm import llm_request
from slipstream_contract.tensors import MODELS

RANGE, DECODE = "retention_token_range_", "retention_decode_"


def ask_llm(parameters=None, **arrays) -> GenerateRequest:
    needed = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 5}
    inputs = inputs_of(MODELS["tensorrt_llm"], **needed) | arrays
    return llm_request(inputs, parameters or {})


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_nothing_said_is_nothing():
    assert ask_llm().retention is None
    empty = {f"{RANGE}{field}": ints() for field in ("starts", "ends", "priorities")}
    assert ask_llm(**empty).retention is None


def test_ranges_and_the_output():
    asked = ask_llm(
        **{
            f"{RANGE}starts": ints(0, 100),
            f"{RANGE}ends": ints(100, -1),
            f"{RANGE}priorities": ints(100, 0),
            f"{RANGE}durations_ms": ints(-1, 30_000),
            f"{DECODE}priority": ints(50),
        }
    )
    ranges = (TokenRange(0, 100, 100), TokenRange(100, -1, 0, 30_000))
    assert asked.retention == Retention(ranges, 50, -1)
    without = ask_llm(
        **{f"{RANGE}starts": ints(5), f"{RANGE}ends": ints(9), f"{RANGE}priorities": ints(1)}
    )
    assert without.retention == Retention((TokenRange(5, 9, 1),))
    assert ask_llm({f"{DECODE}duration_ms": 20}).retention == Retention((), 35, 20)


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (([0], [], [1], []), "ends has 0 values for 1 "),
        (([], [4], [], []), "ends has 1 values for 0 "),
        (([0], [4], [1, 2], []), "priorities has 2 values for 1 "),
        (([0], [4], [1], [5, 5]), "durations_ms has 2 values for 1 "),
        (([-1], [4], [1], []), "starts[0] is -1, not a whole number from 0 to "),
        (([4], [4], [1], []), "ends[0] is 4, not a whole number from 5 to "),
        (([0, 3], [4, 9], [1, 1], []), "starts[1] is 3, not a whole number from 4 to "),
        (([0, 4], [-1, 9], [1, 1], []), "ends[0] is -1, which only the last one may be"),
        (([0], [4], [101], []), "priorities[0] is 101, not a whole number from 0 to 100"),
        (([0], [4], [-1], []), "priorities[0] is -1, not a whole number from 0 to 100"),
        (([0], [4], [1], [0]), "durations_ms[0] is 0, neither -1 (for ever) nor from 1 to "),
        (([0], [4], [1], [-2]), "durations_ms[0] is -2, neither -1 (for ever) nor from 1 to "),
        (
            (range(300), range(1, 301), [1] * 300, []),
            f"starts has 300 ranges, at most {MAX_RANGES} are served",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name_value_and_limit(columns, error):
    names = ("starts", "ends", "priorities", "durations_ms")
    inputs = {f"{RANGE}{n}": ints(*c) for n, c in zip(names, columns, strict=True)}
    with pytest.raises(ContractError, match=f"^INVALID_ARGUMENT: {RANGE}{re.escape(error)}"):
        ask_llm(**inputs)


def test_the_output_has_limits_too():
    with pytest.raises(ContractError, match="retention_decode_priority is 101, not a whole"):
        ask_llm({f"{DECODE}priority": 101})
    with pytest.raises(ContractError, match="retention_decode_duration_ms is 0, neither"):
        ask_llm({f"{DECODE}duration_ms": 0})


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 100)), max_size=5),
    st.booleans(),
    st.integers(0, 70),
    st.integers(0, 80),
)
def test_a_token_is_in_the_range_that_holds_it(gaps, is_open, num_prompt, token):
    ranges, end = [], 0
    for gap, size, priority in gaps:
        ranges.append(TokenRange(end + gap, end + gap + size, priority, priority + 1))
        end += gap + size
    if ranges and is_open:
        ranges[-1] = TokenRange(ranges[-1].start, -1, *gaps[-1][2:], 7)
    retention = Retention(tuple(ranges), 3, 4)
    check_retention(retention)
    expected = None
    for each in ranges:
        if each.start <= token and (each.end == -1 or token < each.end):
            expected = (each.priority, each.duration_ms)
    assert retention.of(token, num_prompt) == ((3, 4) if token >= num_prompt else expected)


def test_a_salt_is_taken_out_of_the_parameters():
    assert split_salt({"cache_salt": "tenant é", "top_k": 1}) == ("tenant é", {"top_k": 1})
    assert split_salt({"top_k": 1}) == ("", {"top_k": 1})
    assert split_salt({"cache_salt": "x" * 256})[0] == "x" * 256
    for salt, error in [
        (5, "cache_salt is 5, not a text"),
        ("é" * 129, "cache_salt has 258 bytes, at most 256 are served"),
        ("\ud800", "no form in UTF-8"),
    ]:
        with pytest.raises(ContractError, match=error):
            split_salt({"cache_salt": salt})
