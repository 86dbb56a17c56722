"""The request parameter `probe`, and what a probe may ask for."""

import pytest
from slipstream_contract.errors import ContractError
from slipstream_contract.probes import MAX_PROMPT_TOKENS, Probe, check_probe, split_probe
from slipstream_contract.sampling import SamplingParams

ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("value", "probe"),
    [
        (True, Probe.PROCESS),
        ("true", Probe.PROCESS),
        ("token", Probe.TOKEN),
        (Probe.TOKEN, Probe.TOKEN),
        (False, Probe.NONE),
        ("false", Probe.NONE),
    ],
)
def test_who_answers(value: object, probe: Probe) -> None:
    assert split_probe({"probe": value, "top_k": 5}) == (probe, {"top_k": 5})
    assert split_probe({"top_k": 5}) == (Probe.NONE, {"top_k": 5})


@pytest.mark.parametrize("value", ["tokens", 2, 0.5, "", None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ContractError, match="INVALID_ARGUMENT: probe is"):
        split_probe({"probe": value})


def test_a_probe_is_small() -> None:
    check_probe(MAX_PROMPT_TOKENS, ONE)
    for num_tokens, sampling, message in (
        (MAX_PROMPT_TOKENS + 1, ONE, "the prompt's length in tokens is 33, at most 32"),
        (1, SamplingParams(max_tokens=2), "max_tokens is 2, at most 1 where probe is 'token'"),
        (1, SamplingParams(max_tokens=1, n=2), "n is 2, at most 1"),
    ):
        with pytest.raises(ContractError, match=message):
            check_probe(num_tokens, sampling)
