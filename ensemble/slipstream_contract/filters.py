"""Filters of tokens that a few requests ask for; `top_k`, `top_p` and `min_p` are in `sampling`.

Each keeps tokens by their probability alone. docs/sampling.md has the formulas and their order.
"""

from typing import Annotated

import msgspec

from slipstream_contract import limits
from slipstream_contract.errors import ContractError
from slipstream_contract.fields import Bounds, Field

_SHARE = Bounds(0, 1)


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `SamplingParams`. Defaults mean "no effect"."""

    typical_p: Annotated[
        float,
        Field(
            "sample from the tokens of the most typical surprise that have so much of the "
            "probability together",
            Bounds(0, 1, is_open=True),
            device="typical_p",
            is_filter=True,
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Field(
            "sample from tokens whose logit is at most so many standard deviations below the "
            "highest; 0 or less: from all",
            Bounds(-1, limits.MAX_SIGMAS),
            device="top_n_sigma",
            is_filter=True,
        ),
    ] = 0.0
    epsilon_cutoff: Annotated[
        float,
        Field(
            "sample from tokens of at least this probability",
            _SHARE,
            device="epsilon_cutoff",
            is_filter=True,
        ),
    ] = 0.0
    eta_cutoff: Annotated[
        float,
        Field(
            "sample from tokens of at least this probability, less where many are likely",
            _SHARE,
            device="eta_cutoff",
            is_filter=True,
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Field(
            "how often the likeliest tokens are left out",
            _SHARE,
            device="xtc_probability",
            is_filter=True,
        ),
    ] = 0.0
    # Above 0.5 no two tokens are so likely.
    xtc_threshold: Annotated[
        float,
        Field(
            "all tokens of at least this probability but the least likely of them are left out",
            _SHARE,
            device="xtc_threshold",
        ),
    ] = 0.1
    # Of output number i, from 0, `top_p` is `top_p * top_p_decay ** i`.
    top_p_decay: Annotated[
        float,
        Field(
            "what `top_p` is multiplied with after each token",
            Bounds(0, 1, is_open=True),
            device="top_p_decay",
            is_filter=True,
        ),
    ] = 1.0
    top_p_min: Annotated[
        float, Field("what `top_p` does not decay below", _SHARE, device="top_p_min")
    ] = 1e-6
    top_p_reset_ids: Annotated[
        int,
        Field(
            "token behind which `top_p` is whole again; -1: none",
            Bounds(-1, limits.INT32_MAX),
        ),
    ] = -1
    mirostat: Annotated[
        int,
        Field(
            "2: keep the surprise of tokens near a target, by mirostat 2; 0: do not",
            Bounds(0, 2),
            is_filter=True,
        ),
    ] = 0
    mirostat_tau: Annotated[
        float,
        Field("the target of the surprise, in bits", Bounds(0, limits.MAX_SURPRISE)),
    ] = 5.0
    mirostat_eta: Annotated[
        float, Field("how fast the bound on the surprise follows it", _SHARE)
    ] = 0.1
    # It leaves no token out, but greedy decoding has none either.
    dynatemp_range: Annotated[
        float,
        Field(
            "how far the temperature moves with the entropy, up and down; 0: it stays",
            Bounds(0, limits.MAX_TEMPERATURE),
            device="dynatemp_range",
            is_filter=True,
        ),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float,
        Field(
            "power of the entropy, as a share of the highest there could be, that moves it",
            Bounds(0, limits.MAX_EXPONENT),
            device="dynatemp_exponent",
        ),
    ] = 1.0


def check_mirostat(mirostat: int) -> None:
    """Raise ContractError for the version of mirostat that is not served."""
    if mirostat == 1:
        raise ContractError("mirostat is 1, but 2 is served, its successor, or 0")
