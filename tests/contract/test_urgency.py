"""Timeouts and priorities: whatever their form, and refusals by name."""

import pytest
from slipstream_contract.errors import ContractError
from slipstream_contract.urgency import Urgency, split_urgency


@pytest.mark.parametrize(
    ("parameters", "triton_us", "urgency"),
    [
        ({}, 0, Urgency(0, 5)),
        ({"timeout_ms": 250}, 0, Urgency(250_000_000, 5)),
        ({"timeout_ms": "250"}, 0, Urgency(250_000_000, 5)),
        ({}, 1500, Urgency(1_500_000, 5)),
        ({"timeout": 1500}, 0, Urgency(1_500_000, 5)),
        ({"timeout": 0}, 0, Urgency(0, 5)),
        ({"timeout_ms": 1}, 1500, Urgency(1_000_000, 5)),
        ({"timeout_ms": 2}, 1500, Urgency(1_500_000, 5)),
        ({"timeout_ms": 86_400_000, "priority": 0}, 0, Urgency(86_400 * 10**9, 0)),
        ({"request_priority": 9}, 0, Urgency(0, 9)),
    ],
)
def test_read(parameters, triton_us, urgency):
    assert split_urgency({"timeout": triton_us, "min_p": 0.5} | parameters) == (
        urgency,
        {"min_p": 0.5},
    )


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"timeout_ms": 0}, "timeout_ms is 0, not a whole number from 1 to 86400000"),
        ({"timeout_ms": -5}, "timeout_ms is -5"),
        ({"timeout_ms": 86_400_001}, "timeout_ms is 86400001"),
        ({"timeout_ms": "soon"}, "timeout_ms is 'soon', not a whole number"),
        ({"timeout_ms": True}, "timeout_ms is True"),
        ({"timeout_ms": 1.5}, "timeout_ms is 1.5"),
        ({"timeout_ms": float("nan")}, "timeout_ms is nan"),
        ({"timeout": -1}, "timeout is -1, not a whole number from 0 to 86400000000"),
        ({"timeout": 2**64}, "timeout is 18446744073709551616"),
        ({"priority": -1}, "priority is -1, not a whole number from 0 to 9"),
        ({"priority": 10}, "priority is 10"),
        ({"request_priority": "high"}, "request_priority is 'high', not a whole number"),
        ({"priority": 1, "request_priority": 1}, "priority and request_priority are given"),
    ],
)
def test_refused_by_name(parameters, words):
    with pytest.raises(ContractError) as caught:
        split_urgency(parameters)
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {words}")
