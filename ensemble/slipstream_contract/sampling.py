"""How to choose tokens: one struct, made from either contract's tensors, for the engine as is."""

import math

import msgspec

from slipstream_contract import limits
from slipstream_contract.errors import ContractError, clip


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Normalised and validated; the engine trusts it. Defaults mean "no effect".

    Greedy decoding is `temperature == 0`. The engine checks token ids against its vocabulary.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and output, as transformers and TensorRT-LLM have it
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    seed: int | None = None  # None: drawn per request; sequence i of n samples with (seed, i)
    n: int = 1
    end_ids: tuple[int, ...] = ()  # end the sequence and are not part of the output
    stop_token_ids: tuple[int, ...] = ()
    stop_words: tuple[bytes, ...] = ()  # matched on bytes, across token borders
    include_stop: bool = True  # the stop word stays in the output (TensorRT-LLM), or not (vLLM)
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    log_probs: bool = False  # of the sampled tokens


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, limits.INT32_MAX),
    ("min_tokens", 0, limits.INT32_MAX),
    ("n", 1, limits.MAX_SEQUENCES),
    ("temperature", 0, limits.MAX_TEMPERATURE),
    ("top_k", 0, limits.INT32_MAX),
    ("top_p", 1e-9, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1 / limits.MAX_PENALTY, limits.MAX_PENALTY),
    ("presence_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY),
    ("frequency_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY),
)


def check_sampling(sampling: SamplingParams) -> None:
    """What would hurt other requests if whoever made the struct had not checked it.

    Raises ContractError. A vocabulary is the engine's to know: ids are not looked at.
    """
    for field, low, high in _RANGES:
        value = getattr(sampling, field)
        if not low <= value <= high:  # NaN is in no range
            raise ContractError(f"{field} is {clip(value)}, not a number from {low} to {high}")
    limits.check_count("stop_token_ids", len(sampling.stop_token_ids), limits.MAX_WORDS, "ids")
    limits.check_word_bytes("stop_words", sampling.stop_words, limits.MAX_STOP_BYTES)
    limits.check_words("bad_words", sampling.bad_words, limits.MAX_BAN_FORMS)
    if not all(sampling.stop_words):
        raise ContractError(f"stop_words[{sampling.stop_words.index(b'')}] is empty")
    if not all(sampling.bad_words):
        raise ContractError(f"bad_words[{sampling.bad_words.index(())}] is empty")
    limits.check_count("bias", len(sampling.bias), limits.MAX_BIASED_TOKENS, "tokens")
    for token_id, weight in sampling.bias:
        if not math.isfinite(weight):
            raise ContractError(f"bias of token {clip(token_id)} is {weight}, not a finite number")
