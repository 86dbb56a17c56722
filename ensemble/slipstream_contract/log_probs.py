"""Log probs and logits that a request wants beside its tokens."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from slipstream_contract.errors import ContractError, clip

WHOLE = -1  # instead of a number of likeliest tokens: all of the vocabulary
MAX_LOG_PROBS = 20
MODES: Mapping[str, tuple[bool, bool]] = MappingProxyType(
    {
        "raw_logprobs": (False, False),
        "processed_logprobs": (True, False),
        "raw_logits": (False, True),
        "processed_logits": (True, True),
    }
)
"""vLLM's name -> whether values are of what is sampled from (after bias, bans, penalties,
temperature and filters) instead of what the model gave; whether they are logits."""


class LogProbs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What comes beside the tokens: of output tokens, of the prompt's, and whole logits.

    `top` and `prompt` are numbers of likeliest tokens, to which the token that is there is added;
    `WHOLE`: the vocabulary; None: nothing. Logits are the model's own, before any edit.
    """

    top: int | None = None
    prompt: int | None = None
    mode: str = ""  # of `MODES`; empty: the engine's
    context_logits: bool = False
    generation_logits: bool = False

    def num_bytes(self, vocab_size: int, num_prompt: int, num_outputs: int) -> int:
        """Return the bytes that whole logits take, at most, and log probs of whole vocabularies.

        An entry of the vocabulary is 4 bytes as a logit, and 64 as JSON.
        """
        prompt = 4 * self.context_logits + 64 * (self.prompt == WHOLE)
        output = 4 * self.generation_logits + 64 * (self.top == WHOLE)
        return vocab_size * (prompt * num_prompt + output * num_outputs)


def check_log_probs(wanted: LogProbs) -> None:
    """Raise ContractError for what is not served."""
    for name, value in (("logprobs", wanted.top), ("prompt_logprobs", wanted.prompt)):
        if value is not None:
            check_num_top(name, value)
    if wanted.mode:
        check_mode(wanted.mode)


def check_num_top(name: str, value: int) -> int:
    """Return a number of likeliest tokens that is served. Raises ContractError."""
    if value != WHOLE and not 0 <= value <= MAX_LOG_PROBS:
        raise ContractError(
            f"{name} is {clip(value)}, not from 0 to {MAX_LOG_PROBS}, and not {WHOLE} for the "
            "whole vocabulary"
        )
    return value


def check_mode(mode: str) -> str:
    """Return a name of `MODES`. Raises ContractError."""
    if mode not in MODES:
        raise ContractError(f"logprobs_mode is {clip(mode)}, not one of {', '.join(MODES)}")
    return mode
