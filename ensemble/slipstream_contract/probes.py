"""Requests of probes; the request parameter `probe` sets them apart from those of clients.

- `true`: the model's process answers with an empty final response; the engine takes no part.
- `"token"`: the request runs as a client's would, and is counted apart from those. So that nobody
  is served uncounted it may be of one token, after a short prompt.
"""

from collections.abc import Mapping
from enum import StrEnum

from slipstream_contract.errors import ContractError, clip
from slipstream_contract.inputs import to_flag
from slipstream_contract.sampling import SamplingParams

PROBE = "probe"
MAX_PROMPT_TOKENS = 32


class Probe(StrEnum):
    """The part of a server that answers a probe."""

    NONE = "none"  # the request is a client's
    PROCESS = "process"
    TOKEN = "token"


def split_probe(parameters: Mapping[str, object]) -> tuple[Probe, dict[str, object]]:
    """Take `probe` out of the request parameters. Raises ContractError."""
    others = dict(parameters)
    value = others.pop(PROBE, False)
    if value == Probe.TOKEN:
        return Probe.TOKEN, others
    try:
        is_probe = to_flag(PROBE, value)
    except ContractError:
        raise ContractError(f"{PROBE} is {clip(value)}, neither true nor 'token'") from None
    return Probe.PROCESS if is_probe else Probe.NONE, others


def check_probe(num_prompt_tokens: int, sampling: SamplingParams) -> None:
    """Raise ContractError for a probe that asks for more than one token."""
    for name, value, limit in (
        ("max_tokens", sampling.max_tokens, 1),
        ("n", sampling.n, 1),
        ("the prompt's length in tokens", num_prompt_tokens, MAX_PROMPT_TOKENS),
    ):
        if value > limit:
            raise ContractError(f"{name} is {value}, at most {limit} where probe is 'token'")
