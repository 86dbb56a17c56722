"""Bounds of what a request may ask for, and checks of them.

What depends on a model, its engine checks itself. `limits_page.py` lists all bounds.
"""

import math
from collections.abc import Callable, Sequence

from slipstream_contract.errors import ContractError, clip

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1

MAX_BATCH_SIZE = 64  # prompts in one request; each is answered by a stream of its own
MAX_REQUEST_ID_BYTES = 512
MAX_SEQUENCES = 256  # num_return_sequences, n
MAX_BEAM_WIDTH = 32  # beam_width; of each beam 64 tokens are looked at
MAX_LENGTH_PENALTY = 100.0  # either sign
MAX_TEMPERATURE = 1e6  # all tokens are as likely then
MAX_PENALTY = 1000.0  # presence and frequency, either sign; the repetition penalty and its inverse
MAX_SIGMAS = 1000.0  # top_n_sigma
MAX_EXPONENT = 100.0  # dynatemp_exponent
MAX_SURPRISE = 64.0  # bits
MAX_BIAS = 1000.0  # added to one logit, either sign
MAX_BIASED_TOKENS = 4096
MAX_WORDS = 1024  # stop words, and bad words, and bias words; stop token ids
MAX_WORD_BYTES = 4096
MAX_WORD_TOKENS = 1024
MAX_STOP_BYTES = 1 << 14  # of all stop words of a request: the engine makes one automaton of them
MAX_LIST_BYTES = 1 << 16  # of all bad words, and of all bias words: they are tokenised
MAX_NGRAM = 64  # no_repeat_ngram_size
NGRAM_OFF = 1 << 30  # TensorRT-LLM's value of it without effect
MAX_ALLOWED_IDS = 4096  # allowed_token_ids
MAX_DRY_TOKENS = 1024  # dry_penalty_last_n; -1 is as many
MAX_BREAKERS = 64  # dry_sequence_breakers
MAX_BREAKER_BYTES = 64  # of each
MAX_PROCESSORS = 16  # logits_processors
MAX_PROCESSOR_BYTES = 1 << 16  # of the arguments of each, in JSON
MAX_BAN_FORMS = 2 * MAX_WORDS  # vllm_model bans a word as it is and after a space
MAX_DRAFT_TOKENS = 64  # of a sequence in a step
MAX_CLIENT_DRAFTS = 1024  # draft_input_ids
MAX_LOOKAHEAD = 1024  # lookahead_window_size, lookahead_verification_set_size
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


def check_whole(field: str, value: int, low: int, high: int = INT32_MAX) -> int:
    """Return the value if it is in bounds. Raises ContractError naming field, value and limits."""
    if not low <= value <= high:
        raise ContractError(f"{field} is {clip(value)}, not a whole number from {low} to {high}")
    return value


def shown(value: float, is_served: Callable[[float], bool]) -> str:
    """Return a number that is not served in seven digits, or in all where those would be served."""
    text = f"{value:.7g}"
    return repr(value) if is_served(float(text)) else text


def check_number(field: str, value: float, low: float, high: float = math.inf) -> float:
    """Return the value if it is finite and in bounds. Raises ContractError."""

    def is_served(number: float) -> bool:
        return math.isfinite(number) and low <= number <= high

    if not is_served(value):
        bounds = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ContractError(f"{field} is {shown(value, is_served)}, not a finite number {bounds}")
    return value


def check_count(field: str, size: int, limit: int, what: str) -> None:
    """Check that there are at most `limit` of something. Raises ContractError."""
    if size > limit:
        raise ContractError(f"{field} has {size} {what}, at most {limit} are served")


def check_word_bytes(field: str, words: Sequence[bytes], limit: int = MAX_LIST_BYTES) -> None:
    """Check words in UTF-8: their number, each length, all lengths. Raises ContractError."""
    check_count(field, len(words), MAX_WORDS, "words")
    for word in words:
        if len(word) > MAX_WORD_BYTES:
            raise ContractError(
                f"{field} has a word of {len(word)} bytes, at most {MAX_WORD_BYTES} are served: "
                f"{clip(word[:64])}"
            )
    check_count(field, sum(map(len, words)), limit, "bytes")


def check_words(field: str, words: Sequence[Sequence[int]], most: int) -> None:
    """Check words as token ids: their number and lengths. Raises ContractError."""
    check_count(field, len(words), most, "words")
    longest = max(map(len, words), default=0)
    if longest > MAX_WORD_TOKENS:
        raise ContractError(
            f"{field} has a word of {longest} tokens, at most {MAX_WORD_TOKENS} are served"
        )


def check_request_id(request_id: str) -> None:
    """Check that a request's id is short enough to be kept and logged. Raises ContractError."""
    size = len(request_id.encode(errors="replace"))
    if size > MAX_REQUEST_ID_BYTES:
        raise ContractError(
            f"the request id has {size} bytes, at most {MAX_REQUEST_ID_BYTES} are served: "
            f"{clip(request_id[:64])}"
        )
