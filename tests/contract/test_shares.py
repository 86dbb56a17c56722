"""Shares of a device: what each engine of a repository gets, whichever starts first."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.deployment import Deployment
from slipstream_contract.shares import check_shares, memory_share


def made(*shares: object) -> list[Deployment]:
    return [
        Deployment(f"m{i}", f"m{i}", f"m{i}_tensorrt_llm", Path("/m"), settings, {}, [], f"h{i}")
        for i, share in enumerate(shares)
        for settings in [{} if share is None else {"memory_share": share}]
    ]


@given(st.lists(st.none() | st.floats(0.01, 0.2), min_size=2, max_size=5))
def test_all_shares_fill_the_device_and_no_more(shares):
    found = [memory_share(made(*shares), f"m{i}_tensorrt_llm") for i in range(len(shares))]
    assert sum(found) <= 1.0 + 1e-6
    if None in shares:
        assert sum(found) == pytest.approx(1.0)
    assert [f for f, s in zip(found, shares, strict=True) if s is not None] == [
        s for s in shares if s is not None
    ]


def test_an_engine_alone_has_what_is_free():
    assert memory_share(made(None), "m0_tensorrt_llm") is None
    assert memory_share(made(0.5), "m0_tensorrt_llm") == 0.5
    assert memory_share(made(), "elsewhere") is None


@pytest.mark.parametrize("shares", [(1.0,), (0.7, 0.2, 0.1), (0.3, None)])
def test_what_fits(shares):
    check_shares(made(*shares))


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.7, 0.5), "the memory shares of m0 0.7, m1 0.5 are 1.2 in all, of 1$"),
        ((0.7, 0.3, None), "are 1 in all, of 1 and leave nothing for m2"),
        ((0.7, 1.5), "m1_tensorrt_llm/1/model.json: memory_share is 1.5, not above 0 and at most"),
        ((True,), "memory_share is True"),
        (("a",), "memory_share is 'a'"),
    ],
)
def test_what_does_not(shares, message):
    with pytest.raises(ValueError, match=message):
        check_shares(made(*shares))
