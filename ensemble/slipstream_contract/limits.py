"""The bounds of what a request may ask for. What depends on a model, its engine checks itself.

`TABLE` below lists them all; docs/limits.md shows it, and tests hold every row against who refuses.
"""

import math
from collections.abc import Mapping, Sequence

from slipstream_contract.errors import ContractError, clip

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1

MAX_BATCH_SIZE = 64  # prompts in one request; each is answered by a stream of its own
MAX_REQUEST_ID_BYTES = 512
MAX_SEQUENCES = 256  # num_return_sequences, n
MAX_TEMPERATURE = 1e6  # all tokens are as likely then
MAX_PENALTY = 1000.0  # presence and frequency, either sign; the repetition penalty and its inverse
MAX_BIAS = 1000.0  # added to one logit, either sign
MAX_BIASED_TOKENS = 4096
MAX_WORDS = 1024  # stop words, and bad words, and bias words; stop token ids
MAX_WORD_BYTES = 4096
MAX_WORD_TOKENS = 1024
MAX_STOP_BYTES = 1 << 14  # of all stop words of a request: the engine makes one automaton of them
MAX_LIST_BYTES = 1 << 16  # of all bad words, and of all bias words: they are tokenised
MAX_BAN_FORMS = 2 * MAX_WORDS  # vllm_model bans a word as it is and after a space
MAX_DETOKENIZED = 1 << 20  # token ids in one request to postprocessing, which all streams share

VLLM_MAX_PENALTY = 2.0  # presence and frequency, either sign
VLLM_MAX_BIAS = 100.0  # either sign
MAX_JSON_BYTES = 1 << 20  # of sampling_parameters

LOWEST_PRIORITY = 9
MAX_TIMEOUT_MS = 86_400_000  # a day
MAX_SALT_BYTES = 256
MAX_RANGES = 256  # of retention
MAX_RETENTION = 100

GREEDY_BELOW = 1e-5
"""Smaller temperatures are 0: dividing by them leaves one token anyway, and overflows."""

_BOTH = "model, engine"
# Field -> least, most, who refuses the rest: the server (Triton), the model in it, the engine.
TABLE: Mapping[str, tuple[float | str, float | str, str]] = {
    "prompts in a request": (1, MAX_BATCH_SIZE, "server"),
    "request id, bytes": (0, MAX_REQUEST_ID_BYTES, "model"),
    "prompt, tokens": (1, "`max_model_len` - 1, and what the KV cache holds", _BOTH),
    "token ids": (0, "vocabulary - 1", "engine"),
    "`max_tokens`": (1, INT32_MAX, _BOTH),
    "`min_tokens`": (0, "`max_tokens`", "model"),
    "`num_return_sequences`, `n`": (1, MAX_SEQUENCES, _BOTH),
    "`temperature`": (0, MAX_TEMPERATURE, _BOTH),
    "`top_k`": (0, INT32_MAX, _BOTH),
    "`top_k` of `vllm_model`": (-1, INT32_MAX, _BOTH),
    "`top_p`": (0, 1, _BOTH),
    "`top_p` of `vllm_model`": ("above 0", 1, _BOTH),
    "`min_p`": (0, 1, _BOTH),
    "`repetition_penalty`": (1 / MAX_PENALTY, MAX_PENALTY, _BOTH),
    "`presence_penalty`, `frequency_penalty`": (-MAX_PENALTY, MAX_PENALTY, _BOTH),
    "the same of `vllm_model`": (-VLLM_MAX_PENALTY, VLLM_MAX_PENALTY, "model"),
    "`seed`": (0, UINT64_MAX, "server"),
    "`seed` of `vllm_model`": (-INT64_MAX - 1, INT64_MAX, "model"),
    "`stop_words`, `stop`: words": (0, MAX_WORDS, _BOTH),
    "... bytes of a word": (1, MAX_WORD_BYTES, "model"),
    "... bytes of all": (0, MAX_STOP_BYTES, _BOTH),
    "`stop_token_ids`: ids": (0, MAX_WORDS, _BOTH),
    "`bad_words`: words": (0, MAX_WORDS, _BOTH),
    "... bytes of a bad word": (1, MAX_WORD_BYTES, "model"),
    "... bytes of all bad words": (0, MAX_LIST_BYTES, "model"),
    "... tokens of a bad word": (1, MAX_WORD_TOKENS, _BOTH),
    "`embedding_bias_words`: words": (0, MAX_WORDS, "model"),
    "... bytes of a bias word": (0, MAX_WORD_BYTES, "model"),
    "... bytes of all bias words": (0, MAX_LIST_BYTES, "model"),
    "`embedding_bias_weights`": (-MAX_BIAS, MAX_BIAS, "model"),
    "biased tokens": (0, MAX_BIASED_TOKENS, _BOTH),
    "`logit_bias` of `vllm_model`": (-VLLM_MAX_BIAS, VLLM_MAX_BIAS, "model"),
    "`logprobs`": (0, "0; 1 where `temperature` is 0", "model"),
    "`sampling_parameters`, bytes": (0, MAX_JSON_BYTES, "model"),
    "`priority`, `request_priority`": (0, LOWEST_PRIORITY, _BOTH),
    "`timeout_ms`": (1, MAX_TIMEOUT_MS, "model"),
    "`timeout`, microseconds": (0, 1000 * MAX_TIMEOUT_MS, "model"),
    "`cache_salt`, bytes": (0, MAX_SALT_BYTES, _BOTH),
    "`retention_token_range_starts`: ranges": (0, MAX_RANGES, _BOTH),
    "`retention_token_range_priorities`, `retention_decode_priority`": (0, MAX_RETENTION, _BOTH),
    "`..._durations_ms`, `retention_decode_duration_ms`": ("1, or -1", INT32_MAX, _BOTH),
    "`TOKENS_BATCH`, token ids": (0, MAX_DETOKENIZED, "model"),
    "requests that wait": (0, "`max_waiting` (4,096 unless configured)", "engine"),
    "tokens that wait": (0, "`max_waiting_tokens` (2,097,152 unless configured)", "engine"),
}


def table() -> str:
    """`TABLE` in Markdown."""
    lines = ["| field | from | to | refused by |", "|---|---|---|---|"]
    for field, (least, most, place) in TABLE.items():
        lines.append(f"| {field} | {_shown(least)} | {_shown(most)} | {place} |")
    return "\n".join(lines)


def _shown(bound: float | str) -> str:
    if isinstance(bound, str):
        return bound
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def check_whole(field: str, value: int, low: int, high: int = INT32_MAX) -> int:
    """The value if it is in bounds. Raises ContractError naming field, value and limits."""
    if not low <= value <= high:
        raise ContractError(f"{field} is {clip(value)}, not a whole number from {low} to {high}")
    return value


def check_number(field: str, value: float, low: float, high: float = math.inf) -> float:
    """The value if it is finite and in bounds. Raises ContractError."""
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ContractError(f"{field} is {value:.7g}, not a finite number {bounds}")
    return value


def check_temperature(field: str, value: float) -> float:
    """A temperature; tiny ones become 0. Raises ContractError."""
    check_number(field, value, 0.0, MAX_TEMPERATURE)
    return 0.0 if value < GREEDY_BELOW else value


def check_repetition_penalty(field: str, value: float) -> float:
    """A factor on logits, above 0. Raises ContractError."""
    return check_number(field, value, 1.0 / MAX_PENALTY, MAX_PENALTY)


def check_min_tokens(field: str, value: int, max_tokens: int) -> int:
    """Tokens before which no end counts. Raises ContractError if they are above `max_tokens`."""
    check_whole(field, value, 0)
    if value > max_tokens:
        raise ContractError(f"{field} is {value}, above the most tokens asked for, {max_tokens}")
    return value


def check_count(field: str, size: int, limit: int, what: str) -> None:
    """Raises ContractError if there are more than `limit` of something."""
    if size > limit:
        raise ContractError(f"{field} has {size} {what}, at most {limit} are served")


def check_word_bytes(field: str, words: Sequence[bytes], limit: int = MAX_LIST_BYTES) -> None:
    """Words in UTF-8: neither too many nor too long, alone and together. Raises ContractError."""
    check_count(field, len(words), MAX_WORDS, "words")
    for word in words:
        if len(word) > MAX_WORD_BYTES:
            raise ContractError(
                f"{field} has a word of {len(word)} bytes, at most {MAX_WORD_BYTES} are served: "
                f"{clip(word[:64])}"
            )
    check_count(field, sum(map(len, words)), limit, "bytes")


def check_words(field: str, words: Sequence[Sequence[int]], most: int = MAX_WORDS) -> None:
    """Words as token ids: neither too many nor too long. Raises ContractError."""
    check_count(field, len(words), most, "words")
    longest = max(map(len, words), default=0)
    if longest > MAX_WORD_TOKENS:
        raise ContractError(
            f"{field} has a word of {longest} tokens, at most {MAX_WORD_TOKENS} are served"
        )


def check_request_id(request_id: str) -> None:
    """Raises ContractError if a request's id is too long to be kept and logged."""
    size = len(request_id.encode(errors="replace"))
    if size > MAX_REQUEST_ID_BYTES:
        raise ContractError(
            f"the request id has {size} bytes, at most {MAX_REQUEST_ID_BYTES} are served: "
            f"{clip(request_id[:64])}"
        )
